from collections import Counter

import pytest

from specdec.bench.faults.kinds import FAULT_KINDS, Party, find_kinds
from specdec.bench.faults.recovery import pause_s
from specdec.bench.faults.schedule import PlannedFault, plan_faults
from specdec.bench.faults.stream import Output


def planned(num_faults: int, seed: int = 0) -> list[PlannedFault]:
    return [fault for lane in plan_faults(num_faults, FAULT_KINDS, seed).values() for fault in lane]


def test_every_kind_comes_before_any_comes_again() -> None:
    assert Counter(fault.kind.name for fault in planned(len(FAULT_KINDS))) == {kind.name: 1 for kind in FAULT_KINDS}


def test_a_long_campaign_has_every_kind_in_proportion_to_its_weight() -> None:
    counted = Counter(fault.kind.name for fault in planned(300))
    assert sum(counted.values()) == 300
    assert min(counted.values()) >= 4
    assert counted["verifier:kill"] > 2 * counted["drafter-verifier:reset"]


def test_a_seed_gives_one_plan() -> None:
    assert planned(50, seed=3) == planned(50, seed=3)
    assert planned(50, seed=3) != planned(50, seed=4)


def test_faults_of_one_lane_never_strike_two_verifiers_at_once() -> None:
    lanes = plan_faults(300, FAULT_KINDS, 0)
    assert all(fault.kind.lane is lane for lane, faults in lanes.items() for fault in faults)
    assert {kind.lane for kind in FAULT_KINDS if kind.target is Party.VERIFIER and kind.source is None} == {
        Party.VERIFIER
    }


def test_every_pair_of_roles_that_talk_is_parted_one_way_and_both() -> None:
    names = {kind.name for kind in FAULT_KINDS}
    for pair in ("client-orchestrator", "orchestrator-verifier", "orchestrator-drafter", "drafter-verifier"):
        assert {f"{pair}:hold_to_server", f"{pair}:hold_to_client", f"{pair}:hold_both"} <= names


def test_kinds_are_found_by_how_their_names_begin() -> None:
    assert {kind.name for kind in find_kinds("store:kill_losing")} == {
        "store:kill_losing_tail",
        "store:kill_losing_all",
    }
    assert find_kinds("") == FAULT_KINDS
    with pytest.raises(ValueError, match="no kind of fault begins with 'oracle'"):
        find_kinds("verifier, oracle")


def test_the_pause_of_a_fault_is_the_longest_that_it_can_have_caused() -> None:
    output = Output(0, "s", asked_s=0.0, arrivals=[(at_s, 1) for at_s in (1.0, 2.0, 5.0, 5.5, 20.0)])
    assert pause_s(output, began_s=2.2, struck_until_s=3.2) == pytest.approx(2.8)  # from the fault, not from the token
    assert pause_s(output, began_s=1.9, struck_until_s=2.9) == pytest.approx(3.0)  # what was on its way ends no pause
    assert pause_s(output, began_s=3.0, struck_until_s=9.0) == pytest.approx(14.5)  # of a drain that took a while
    assert pause_s(output, began_s=21.0, struck_until_s=22.0) is None
