"""Shares of tenants, in a time that the tests tell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tenant_limits import TenantLimits, TenantTable, TenantUse
from specdec.errors import InvalidParameterError, RateLimitedError, SpecdecError, TooManyStreamsError

ODD_RATES = st.floats(0.01, 100.0, allow_nan=False)


def use_with(limits: TenantLimits) -> TenantUse:
    return TenantUse(lambda: limits)


def refusal(use: TenantUse, now_s: float, *, num_streams: int = 1, resumes: bool = False) -> SpecdecError | None:
    try:
        use.begin(num_streams, now_s, resumes=resumes)
    except SpecdecError as error:
        return error
    return None


def test_a_tenant_without_limits_is_never_refused() -> None:
    use = use_with(TenantLimits())
    for _ in range(1000):
        use.begin(16, 0.0)
        use.charge(10**9, 0.0)


def test_a_burst_is_let_in_and_then_as_many_as_the_rate_says() -> None:
    use = use_with(TenantLimits(requests_per_s=2.0, request_burst=3))
    assert [refusal(use, 0.0) is None for _ in range(4)] == [True, True, True, False]
    assert refusal(use, 0.499) is not None
    assert [refusal(use, 0.5) is None for _ in range(2)] == [True, False]
    assert [refusal(use, 100.0) is None for _ in range(4)] == [True, True, True, False]


@given(rate=ODD_RATES, burst=st.integers(1, 5), num_before=st.integers(1, 5), pause_s=st.floats(0, 3))
def test_who_comes_again_when_told_is_let_in_and_not_much_earlier(
    rate: float, burst: int, num_before: int, pause_s: float
) -> None:
    use = use_with(TenantLimits(requests_per_s=rate, request_burst=burst))
    for _ in range(num_before):
        refusal(use, 0.0)
    refused = refusal(use, pause_s)
    while refused is None:
        refused = refusal(use, pause_s)
    assert isinstance(refused, RateLimitedError)
    assert refused.retry_after_s is not None
    assert refusal(use, pause_s + 0.99 * refused.retry_after_s - 1e-6) is not None
    assert refusal(use, pause_s + refused.retry_after_s + 1e-6) is None


def test_tokens_are_charged_when_they_are_served_and_a_debt_keeps_new_requests_out() -> None:
    use = use_with(TenantLimits(tokens_per_s=100.0, token_burst=50))
    assert refusal(use, 0.0) is None
    use.charge(250, 0.0)
    refused = refusal(use, 1.0)
    assert isinstance(refused, RateLimitedError)
    assert refused.retry_after_s == pytest.approx((250 - 50 + 1) / 100 - 1.0)
    assert refused.metadata == {"limit": "tokens"}
    assert refusal(use, 1.0 + refused.retry_after_s) is None


def test_streams_at_one_time_are_bounded_and_free_when_they_end() -> None:
    use = use_with(TenantLimits(max_streams=4))
    use.begin(3, 0.0)
    refused = refusal(use, 0.0, num_streams=2)
    assert isinstance(refused, TooManyStreamsError)
    assert refused.retry_after_s is not None
    assert refusal(use, 0.0) is None
    use.end(3, 1.0)
    assert refusal(use, 0.0, num_streams=3) is None


def test_more_samples_than_a_tenant_ever_has_streams_are_not_told_to_come_again() -> None:
    use = use_with(TenantLimits(max_streams=4))
    refused = refusal(use, 0.0, num_streams=5)
    assert isinstance(refused, InvalidParameterError)
    assert refused.retry_after_s is None
    assert refused.metadata == {"field": "num_samples"}
    assert refusal(use, 0.0, num_streams=4) is None


def test_a_refused_request_takes_nothing() -> None:
    limits = TenantLimits(requests_per_s=1.0, request_burst=1, max_streams=1)
    use = use_with(limits)
    use.begin(1, 0.0)
    for _ in range(100):
        assert isinstance(refusal(use, 10.0), TooManyStreamsError)
    use.end(1, 1.0)
    assert refusal(use, 10.0) is None
    assert use.num_streams == 1


def test_new_requests_do_not_stand_in_the_way_of_sessions_that_go_on() -> None:
    use = use_with(TenantLimits(requests_per_s=0.1, request_burst=1, max_streams=8))
    use.begin(8, 0.0)
    assert refusal(use, 0.0) is not None
    assert [refusal(use, 0.0, resumes=True) for _ in range(8)] == [None] * 8  # those of a lost replica
    assert isinstance(refusal(use, 0.0, resumes=True), TooManyStreamsError)
    use.end(8, 1.0)
    assert isinstance(refusal(use, 0.0, resumes=True), RateLimitedError)  # a flood of them has an end too


def test_a_resume_takes_the_place_of_the_stream_that_it_ends() -> None:
    use = use_with(TenantLimits(max_streams=1))
    use.begin(1, 0.0)
    use.begin(1, 0.0, resumes=True)
    with pytest.raises(TooManyStreamsError):
        use.begin(1, 0.0, resumes=True)
    use.begin(1, 0.0, resumes=True, num_ending=1)


def test_limits_that_change_hold_from_the_next_request_on() -> None:
    limits = TenantLimits(requests_per_s=1.0)
    use = TenantUse(lambda: limits)
    assert [refusal(use, 0.0) is None for _ in range(2)] == [True, False]
    limits = TenantLimits(requests_per_s=1.0, request_burst=2)
    assert [refusal(use, 0.0) is None for _ in range(2)] == [True, False]
    limits = TenantLimits()
    assert refusal(use, 0.0) is None


def test_one_tenants_flood_is_nobody_elses() -> None:
    table = TenantTable(lambda tenant: TenantLimits(requests_per_s=1.0))
    assert [refusal(table.use_of("loud", 0.0), 0.0) is None for _ in range(3)] == [True, False, False]
    assert refusal(table.use_of("quiet", 0.0), 0.0) is None


def test_a_flood_of_names_is_not_remembered_and_buys_no_share_of_its_own() -> None:
    table = TenantTable(lambda tenant: TenantLimits(requests_per_s=1.0), max_tenants=10)

    def is_let_in(tenant: str, now_s: float) -> bool:
        use = table.use_of(tenant, now_s)
        if refusal(use, now_s) is not None:
            return False
        use.end(1, 0.0)
        return True

    assert sum(is_let_in(f"name-{number}", 0.0) for number in range(1000)) == 11  # ten, and all others together one
    assert len(table) == 10
    assert sum(is_let_in(f"later-{number}", 5.0) for number in range(10)) == 10
    assert len(table) == 10


def test_who_has_a_stream_open_is_remembered() -> None:
    table = TenantTable(lambda tenant: TenantLimits(max_streams=1), max_tenants=2)
    table.use_of("long", 0.0).begin(1, 0.0)
    for number in range(100):
        table.use_of(f"name-{number}", float(number))
    assert isinstance(refusal(table.use_of("long", 200.0), 200.0), TooManyStreamsError)
