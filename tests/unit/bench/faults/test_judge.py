"""A promise that is broken must be seen: outputs with one defect each, against the right ones."""

import dataclasses

from specdec.bench.faults.judge import judge
from specdec.bench.faults.kinds import FAULT_KINDS
from specdec.bench.faults.records import FaultRecord, LeftOver
from specdec.bench.faults.requests import CampaignRequest, campaign_requests
from specdec.bench.faults.stream import Output

REQUESTS = {request.number: request for request in campaign_requests(16, 6, seed=1)}
GREEDY, ONE_HOT = 0, 1


def output(number: int = GREEDY, **differences: object) -> Output:
    """As it should be, but for the differences."""
    right = Output(number, f"s{number}", 0.0, token_ids=[1, 2, 3, 4, 5, 6], text="one two", ended_s=1.0)
    return dataclasses.replace(right, **differences)  # type: ignore[arg-type]


def broken(*outputs: Output, faults: tuple[FaultRecord, ...] = (), left_over: LeftOver | None = None) -> dict[str, int]:
    undisturbed = {number: output(number) for number in REQUESTS}
    promises = judge(REQUESTS, undisturbed, outputs, faults, left_over or LeftOver())
    return {promise.name: promise.num_broken for promise in promises if promise.num_broken}


def requests_of(rule: str) -> list[CampaignRequest]:
    return [request for request in REQUESTS.values() if request.spec.sampling.rule.value == rule]


def test_requests_are_greedy_coupled_and_one_hot() -> None:
    assert {rule: len(requests_of(rule)) for rule in ("GREEDY", "COUPLED", "ONE_HOT")} == {
        "GREEDY": 8,
        "COUPLED": 6,
        "ONE_HOT": 2,
    }
    assert not REQUESTS[ONE_HOT].repeatable
    assert REQUESTS[GREEDY].repeatable


def test_an_output_like_the_undisturbed_one_breaks_nothing() -> None:
    assert broken(output(), output(ONE_HOT)) == {}


def test_every_token_that_differs_is_counted_and_so_is_the_text() -> None:
    assert broken(output(token_ids=[1, 9, 3, 9, 5, 6])) == {"tokens changed": 2}
    assert broken(output(text="one two three")) == {"texts changed": 1}


def test_one_hot_may_say_something_else_but_neither_less_nor_more() -> None:
    assert broken(output(ONE_HOT, token_ids=[9, 9, 9, 9, 9, 9], text="other")) == {}
    assert broken(output(ONE_HOT, token_ids=[9, 9, 9])) == {"tokens lost": 3}
    assert broken(output(ONE_HOT, num_repeated=1)) == {"tokens repeated": 1}


def test_tokens_that_are_missing_or_too_many_are_lost_and_repeated() -> None:
    assert broken(output(token_ids=[1, 2, 3, 4])) == {"tokens lost": 2}
    assert broken(output(token_ids=[1, 2, 3, 4, 5, 6, 6])) == {"tokens repeated": 1}
    assert broken(output(num_lost=3)) == {"tokens lost": 3}


def test_an_output_that_was_given_up_counts_once_if_what_came_was_right() -> None:
    assert broken(output(token_ids=[1, 2], text="one", error="INTERNAL: no")) == {"outputs that ended in an error": 1}
    assert broken(output(token_ids=[1, 9], text="on", error="INTERNAL: no")) == {
        "outputs that ended in an error": 1,
        "tokens changed": 1,
    }


def test_what_is_left_over_and_what_did_not_come_back_is_told() -> None:
    left_over = LeftOver(kv_bytes=64, num_keys_after_expiry=2, unexpected_ends=("verifier-0 ended",))
    fault = FaultRecord(0, FAULT_KINDS[0], "verifier-0", "", 1.0, 2.0, 40.0, (), error="not seen again")
    assert broken(faults=(fault,), left_over=left_over) == {
        "bytes of keys and values left over": 64,
        "store keys after expiry": 2,
        "processes that ended by themselves": 1,
        "faults without recovery": 1,
    }
