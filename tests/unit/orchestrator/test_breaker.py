"""Circuits open, rest, and close again."""

import pytest

from orchestrator.breaker import (
    MAX_REST_S,
    MIN_REST_S,
    NUM_FAILURES_TO_OPEN,
    PROBE_TIMEOUT_S,
    Breaker,
    Outcome,
    apply,
    outcome_of,
)
from orchestrator.circuits import Circuits
from specdec import errors
from specdec.messages.cluster import CircuitState


def failed(times: int, now: float = 0.0, breaker: Breaker | None = None) -> Breaker:
    breaker = breaker or Breaker()
    for _ in range(times):
        breaker = apply(breaker, Outcome.FAILED, now)
    return breaker


def test_a_circuit_opens_at_the_third_failure_and_a_use_that_went_well_starts_the_count_again() -> None:
    assert failed(NUM_FAILURES_TO_OPEN - 1).state(0.0) is CircuitState.CLOSED
    assert failed(NUM_FAILURES_TO_OPEN).state(0.0) is CircuitState.OPEN
    forgiven = apply(failed(NUM_FAILURES_TO_OPEN - 1), Outcome.WORKED, 0.0)
    assert failed(NUM_FAILURES_TO_OPEN - 1, breaker=forgiven).state(0.0) is CircuitState.CLOSED


def test_an_answer_alone_does_not_forgive_what_ends_at_once_every_time() -> None:
    breaker = Breaker()
    for _ in range(NUM_FAILURES_TO_OPEN):
        breaker = apply(apply(breaker, Outcome.ANSWERED, 0.0), Outcome.FAILED, 0.0)
    assert breaker.state(0.0) is CircuitState.OPEN


def test_half_open_lets_one_attempt_through_at_a_time() -> None:
    breaker, later = failed(NUM_FAILURES_TO_OPEN), MIN_REST_S
    assert not breaker.lets_through(later - 0.01)
    assert breaker.lets_through(later)
    probed = apply(breaker, Outcome.TRIED, later)
    assert (probed.state(later), probed.lets_through(later)) == (CircuitState.HALF_OPEN, False)
    assert apply(probed, Outcome.ABANDONED, later).lets_through(later)
    assert probed.lets_through(later + PROBE_TIMEOUT_S), "a probe whose maker is gone blocks nobody for ever"


def test_a_probe_that_is_answered_closes_the_circuit_and_one_that_fails_doubles_the_rest() -> None:
    now, rests, breaker = 0.0, [], failed(NUM_FAILURES_TO_OPEN)
    for _ in range(9):
        rests.append(breaker.wait_s(now))
        now += breaker.wait_s(now)
        breaker = apply(apply(breaker, Outcome.TRIED, now), Outcome.FAILED, now)
    assert rests[:4] == pytest.approx([MIN_REST_S, 2 * MIN_REST_S, 4 * MIN_REST_S, 8 * MIN_REST_S])
    assert rests[-1] == pytest.approx(MAX_REST_S)
    now += breaker.wait_s(now)
    closed = apply(apply(breaker, Outcome.TRIED, now), Outcome.ANSWERED, now)
    assert closed.state(now) is CircuitState.CLOSED
    assert apply(closed, Outcome.FAILED, now).wait_s(now) == pytest.approx(MAX_REST_S), "it has proved nothing yet"
    assert apply(apply(closed, Outcome.WORKED, now), Outcome.FAILED, now).state(now) is CircuitState.CLOSED


def test_what_is_told_of_attempts_from_before_it_opened_changes_nothing() -> None:
    opened = failed(NUM_FAILURES_TO_OPEN)
    for outcome in Outcome:
        assert apply(opened, outcome, 0.1) == opened


def test_a_busy_server_rests_as_long_as_it_asked_and_nothing_is_held_against_it() -> None:
    busy = apply(Breaker(), Outcome.BUSY, 0.0, rest_s=2.0)
    assert (busy.state(1.9), busy.state(2.0)) == (CircuitState.OPEN, CircuitState.HALF_OPEN)
    again = apply(apply(busy, Outcome.TRIED, 2.0), Outcome.BUSY, 2.0, rest_s=2.0)
    assert again.wait_s(2.0) == 2.0
    assert apply(again, Outcome.ANSWERED, 4.0) == Breaker()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.PeerUnavailableError("gone"), Outcome.FAILED),
        (errors.DeadlineError("late"), Outcome.FAILED),
        (TimeoutError(), Outcome.FAILED),
        (errors.SpecdecError("a bug there"), Outcome.FAILED),
        (errors.OverloadedError("full"), Outcome.BUSY),
        (errors.DrainingError("going"), Outcome.BUSY),
        (errors.InvalidParameterError("yours"), Outcome.ANSWERED),
        (errors.PromptTooLongError("yours"), Outcome.ANSWERED),
        (errors.AttachRefusedError("yours"), Outcome.ANSWERED),
        (errors.FencedError("yours"), Outcome.ANSWERED),
        (KeyError("ours"), Outcome.ABANDONED),
    ],
)
def test_only_what_is_the_servers_own_fault_counts_against_it(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


def test_a_drafter_that_cannot_reach_one_verifier_serves_others_still() -> None:
    circuits = Circuits()
    changes = [circuits.note("d:1", "v:1", Outcome.FAILED, 0.0) for _ in range(NUM_FAILURES_TO_OPEN)]
    assert changes == [False, False, True]
    assert circuits.resting("v:1", 0.0) == {"d:1": MIN_REST_S}
    assert circuits.resting("v:2", 0.0) == {}
    assert circuits.state("d:1", 0.0) is CircuitState.OPEN
    assert circuits.state("d:2", 0.0) is CircuitState.CLOSED


@pytest.mark.parametrize("restarted", ["d:1", "v:1"])
def test_a_server_that_starts_anew_has_a_clean_record_on_both_sides(restarted: str) -> None:
    circuits = Circuits()
    for _ in range(NUM_FAILURES_TO_OPEN):
        circuits.note("d:1", "v:1", Outcome.FAILED, 0.0)
    circuits.forget(restarted)
    assert circuits.resting("v:1", 0.0) == {}
