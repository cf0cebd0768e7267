"""Made-up cells of a load benchmark with figures that are easy to work out by hand."""

from collections.abc import Mapping, Sequence

from specdec.bench.load_plan import LoadCell
from specdec.bench.load_run import CellRecord, Output
from specdec.bench.plan import Lane
from specdec.bench.scrape import Scrape
from specdec.messages import RoundStatistics, SpeculativeStatistics
from specdec.params import NextTokenKind

NGRAM = Lane("ngram")


def output(
    stream: int,
    token_ids: Sequence[int],
    *,
    index: int = 0,
    asked_s: float = 0.0,
    first_s: float = 1.0,
    token_s: float = 0.1,
    num_draft_tokens: int = 0,
) -> Output:
    """A token a delta, the first at `first_s`, then one every `token_s`; no draft token is accepted."""
    kind = NextTokenKind.RECOVERED if num_draft_tokens else NextTokenKind.PLAIN
    one = RoundStatistics(num_draft_tokens, 0, kind, total_time_s=token_s, verify_forward_time_s=0.0, queue_time_s=0.0)
    return Output(
        key=(stream, index),
        asked_s=asked_s,
        ended_s=first_s + token_s * (len(token_ids) - 1),
        token_ids=tuple(token_ids),
        arrivals=tuple((first_s + token_s * number, 1) for number in range(len(token_ids))),
        rounds=(one,) * len(token_ids),
        statistics=SpeculativeStatistics(num_rounds=len(token_ids)),
    )


def cell(
    outputs: Sequence[Output],
    *,
    num_streams: int = 2,
    lane: Lane | None = None,
    repetition: int = 0,
    elapsed_s: float = 4.0,
    counters: Mapping[str, Scrape] | None = None,
    errors: Sequence[str] = (),
) -> CellRecord:
    named = LoadCell(repetition, num_streams, lane)
    return CellRecord(named, elapsed_s, outputs, {"verifier": 1.0, "client": 0.5}, counters or {}, errors)
