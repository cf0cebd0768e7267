"""Schedules that somebody thought of, or that once failed: one for each row of the table of losses."""

import pytest

from specdec.params import AcceptanceRule
from tests.simulation.faults import Fault, Kind, Request, Schedule
from tests.simulation.world import World, run_schedule

pytestmark = pytest.mark.usefixtures("simulation")

REQUESTS = tuple(Request(rule, seed, max_new_tokens=24) for seed, rule in enumerate((
    AcceptanceRule.GREEDY,
    AcceptanceRule.COUPLED,
    AcceptanceRule.ONE_HOT,
)))  # fmt: skip


def run(*faults: Fault, **shape: object) -> World:
    return run_schedule(Schedule(REQUESTS, faults, **shape))  # type: ignore[arg-type]


def num_streams(world: World) -> list[int]:
    return [client.num_streams for client in world.clients.values()]


def test_an_undisturbed_cluster_needs_one_stream_for_each_output() -> None:
    world = run()
    assert [client.outcome for client in world.clients.values()] == ["finished"] * 3
    assert num_streams(world) == [1, 1, 1]


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.PAUSE, Kind.TERMINATE])
@pytest.mark.parametrize("strict", [False, True])
def test_clients_do_not_see_that_a_verifier_is_lost(kind: Kind, strict: bool) -> None:
    world = run(Fault(0.5, kind, "verifier0", for_s=20.0), strict=strict)
    assert [client.outcome for client in world.clients.values()] == ["finished"] * 3
    assert num_streams(world) == [1, 1, 1]


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.PAUSE, Kind.TERMINATE])
def test_clients_do_not_see_that_a_drafter_is_lost(kind: Kind) -> None:
    assert num_streams(run(Fault(0.5, kind, "drafter0", for_s=20.0))) == [1, 1, 1]


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.PAUSE, Kind.TERMINATE])
def test_clients_of_a_lost_orchestrator_go_on_at_another(kind: Kind) -> None:
    world = run(Fault(0.5, kind, "orchestrator0", for_s=20.0))
    assert [client.outcome for client in world.clients.values()] == ["finished"] * 3


@pytest.mark.parametrize("kind", [Kind.STORE_AWAY, Kind.STORE_EMPTY, Kind.STORE_REPLIES_LOST])
def test_relaxed_streams_do_not_end_with_the_store(kind: Kind) -> None:
    assert num_streams(run(Fault(0.5, kind, for_s=4.0))) == [1, 1, 1]


def test_a_store_that_comes_back_empty_gives_two_owners_one_epoch_and_no_client_another_token() -> None:
    world = run(
        Fault(0.5, Kind.CUT, "orchestrator0", "store", for_s=20.0),
        Fault(0.0, Kind.STORE_EMPTY),
        Fault(0.0, Kind.CLIENT_FORGETS, "client0"),
        Fault(0.0, Kind.CLIENT_FORGETS, "client2"),
    )
    assert not world.violations


@pytest.mark.parametrize("source", ["orchestrator0", "verifier0"])
def test_a_link_that_carries_one_way_is_as_good_as_none(source: str) -> None:
    other = {"orchestrator0": "verifier0", "verifier0": "orchestrator0"}[source]
    world = run(Fault(0.5, Kind.CUT_ONE_WAY, source, other, for_s=20.0))
    assert [client.outcome for client in world.clients.values()] == ["finished"] * 3


def test_an_owner_that_stood_still_and_comes_back_writes_nothing() -> None:
    """Its client resumed elsewhere once the lease was over; the monitors look at what it writes when it wakes."""
    world = run(
        Fault(0.5, Kind.PAUSE, "orchestrator0", for_s=9.0),
        Fault(0.0, Kind.CLIENT_FORGETS, "client0"),
        Fault(0.0, Kind.CLIENT_FORGETS, "client2"),
    )
    assert [client.outcome for client in world.clients.values()] == ["finished"] * 3
    assert int(world.store.data[b"specdec:{client0}:record"][b"epoch"]) > 1
