"""Were the promises kept? Compares every output with that of an undisturbed run, token by token. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence

from specdec.bench.faults.records import FaultRecord, LeftOver
from specdec.bench.faults.requests import CampaignRequest
from specdec.bench.faults.stream import Output

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Promise:
    """Kept where `num_broken` is 0; `examples` say where it was not, at most some of them."""

    name: str
    num_broken: int
    examples: Sequence[str] = ()


def judge(
    requests: Mapping[int, CampaignRequest],
    undisturbed: Mapping[int, Output],
    outputs: Sequence[Output],
    faults: Sequence[FaultRecord],
    left_over: LeftOver,
) -> list[Promise]:
    """Every promise, kept or not. `requests` and `undisturbed` are by a request's number, which an output carries."""
    comparisons = [_compare(requests[one.number], undisturbed[one.number], one) for one in outputs]
    gave_up = [one for one in outputs if one.error]
    not_back = [fault for fault in faults if fault.error]
    return [
        _summed("tokens lost", [(one.where, one.num_lost) for one in comparisons]),
        _summed("tokens repeated", [(one.where, one.num_repeated) for one in comparisons]),
        _summed("tokens changed", [(one.where, one.num_changed) for one in comparisons]),
        _summed("texts changed", [(one.where, int(one.text_changed)) for one in comparisons]),
        _summed("outputs that ended in an error", [(f"{_where(one)}: {one.error}", 1) for one in gave_up]),
        _summed("sessions left over", [("", left_over.num_sessions)]),
        _summed("attachments left over", [("", left_over.num_attachments)]),
        _summed("bytes of keys and values left over", [("", left_over.kv_bytes)]),
        _summed("store keys without expiry", [("", left_over.num_keys_without_expiry)]),
        _summed("store keys after expiry", [("", left_over.num_keys_after_expiry)]),
        _summed("processes left over", [("", left_over.num_processes)]),
        _summed("processes that ended by themselves", [(end, 1) for end in left_over.unexpected_ends]),
        _summed("faults without recovery", [(f"fault {one.number}: {one.error}", 1) for one in not_back]),
    ]


@dataclasses.dataclass(frozen=True)
class _Comparison:
    where: str
    num_lost: int
    num_repeated: int
    num_changed: int
    text_changed: bool


def _compare(request: CampaignRequest, expected: Output, output: Output) -> _Comparison:
    """Of an output that is not repeatable only the positions are compared. One that ended in an error lacks its rest
    by that error, which counts by itself."""
    ended = not output.error and output.ended_s is not None
    num_missing = max(0, len(expected.token_ids) - len(output.token_ids)) if ended else 0
    num_beyond = max(0, len(output.token_ids) - len(expected.token_ids))
    pairs = list(zip(output.token_ids, expected.token_ids, strict=False))
    num_changed = sum(token_id != right for token_id, right in pairs) if request.repeatable else 0
    text_changed = request.repeatable and not (
        output.text == expected.text if ended else expected.text.startswith(output.text)
    )
    where = _where(output)
    if num_changed:
        where += f", first at {next(at for at, (token_id, right) in enumerate(pairs) if token_id != right)}"
    return _Comparison(
        where, output.num_lost + num_missing, output.num_repeated + num_beyond, num_changed, text_changed
    )


def _where(output: Output) -> str:
    return f"session {output.session_id}, request {output.number}, {len(output.token_ids)} tokens received"


def _summed(name: str, counted: Sequence[tuple[str, int]]) -> Promise:
    broken = [(where, count) for where, count in counted if count]
    return Promise(name, sum(count for _, count in broken), [f"{where} ({count})" for where, count in broken][:_SHOWN])
