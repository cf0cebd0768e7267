"""What drafters bring, as measured; and how long an attach may take."""

import dataclasses

import pytest

from orchestrator.hedge_delay import MAX_DELAY_S, MIN_DELAY_S, HedgeDelay
from orchestrator.measurements import Measurements
from specdec.messages import RoundStatistics
from specdec.params import NextTokenKind

ROUND = RoundStatistics(
    num_draft_tokens=4,
    num_accepted_tokens=2,
    next_token_kind=NextTokenKind.RECOVERED,
    total_time_s=0.04,
    verify_forward_time_s=0.03,
    queue_time_s=0.0,
    draft_time_s=0.005,
    round_trip_time_s=0.002,
)


def measured(num_rounds: int = 200, *, drafter: str = "d:1", tenant: str = "t", **changes: object) -> Measurements:
    known = Measurements()
    for _ in range(num_rounds):
        known.note(drafter, "v:1", tenant, dataclasses.replace(ROUND, **changes), 0.0)
    return known


def rate(
    known: Measurements, *, drafter: str = "d:1", tenant: str = "t", verifier: str = "v:1", **more: float
) -> float:
    return known.expected_tokens_per_s(drafter, verifier, tenant, more.pop("now", 0.0), **more)


def test_the_expected_gain_is_tokens_over_the_time_of_a_round_not_acceptance_alone() -> None:
    assert rate(measured(2000), num_sessions=0) == pytest.approx(3 / 0.037, rel=0.1)
    far = measured(num_accepted_tokens=3, round_trip_time_s=0.08)
    assert rate(far) < rate(measured(num_accepted_tokens=1))


def test_a_drafter_that_is_good_for_one_tenant_may_be_poor_for_another() -> None:
    known = measured(tenant="code", num_accepted_tokens=4)
    for _ in range(100):
        known.note("d:1", "v:1", "verse", dataclasses.replace(ROUND, num_accepted_tokens=0), 0.0)
    assert rate(known, tenant="code") > 2 * rate(known, tenant="verse")
    assert rate(known, tenant="verse") < rate(known, tenant="new") < rate(known, tenant="code")


def test_rounds_that_waited_in_vain_count_and_rounds_that_were_to_have_no_draft_do_not() -> None:
    plain = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "draft_time_s": None, "round_trip_time_s": None}
    rested, late = measured(), measured()
    for _ in range(100):
        rested.note("d:1", "v:1", "t", dataclasses.replace(ROUND, **plain), 0.0)
        late.note("d:1", "v:1", "t", dataclasses.replace(ROUND, **plain, fallback_decode=True), 0.0)
        rested.note("", "v:1", "t", dataclasses.replace(ROUND, num_accepted_tokens=0), 0.0)
    assert rate(rested) == rate(measured())
    assert rate(late) < 0.8 * rate(measured())


def test_the_unknown_is_tried_before_the_middling_by_one_session_at_a_time_and_not_before_the_good() -> None:
    middling, good = measured(num_accepted_tokens=1), measured(num_accepted_tokens=4)
    assert rate(middling, drafter="new") > rate(middling)
    assert rate(good, drafter="new") < rate(good)
    assert rate(middling, drafter="new", num_sessions=4) < rate(middling)


def test_what_was_measured_long_ago_is_tried_again() -> None:
    poor = measured(num_accepted_tokens=0)
    assert rate(poor) < rate(poor, now=600.0) < rate(poor, now=6000.0)
    assert rate(poor, now=60_000.0) == pytest.approx(rate(Measurements(), now=60_000.0), rel=0.2)


def test_more_sessions_slow_a_drafter_down_from_where_it_was_measured() -> None:
    known = measured(2000, draft_time_s=0.02)
    alone, crowd = rate(known, num_reported=4, num_sessions=4), rate(known, num_reported=4, num_sessions=12)
    assert crowd < 0.7 * alone


def test_an_unmeasured_way_to_a_verifier_is_taken_to_be_like_the_way_to_others_or_to_the_drafter_itself() -> None:
    known = measured(round_trip_time_s=0.05)
    assert rate(known, verifier="v:2") < rate(measured(round_trip_time_s=0.001), verifier="v:2")
    assert rate(Measurements(), round_trip_time_s=0.05) < rate(Measurements(), round_trip_time_s=0.001)


def test_measurements_are_bounded() -> None:
    known = Measurements(capacity=20)
    for number in range(100):
        known.note("d:1", "v:1", f"tenant {number}", ROUND, 0.0)
    assert len(known) == 20


def test_a_second_attach_waits_longer_than_nearly_all_attaches_took_within_bounds() -> None:
    known = HedgeDelay()
    assert known.delay_s == 1.0
    for attach_s in [0.2, 0.3, 0.25, 0.35] * 10:
        known = known.observed(attach_s)
    assert 0.35 < known.delay_s < 0.6
    for _ in range(100):
        known = known.observed(0.001)
    assert known.delay_s == MIN_DELAY_S
    assert HedgeDelay().observed(60.0).delay_s == MAX_DELAY_S
