"""The figures of one cell of a load benchmark. Pure. Definitions that the JSON's readers rely on:

- tokens/s: tokens of all streams over the time from the first request to the end of the last output.
- tokens/s, steady: the same over the stretch in which every stream was past its first token and none had ended.
- time to first token: from a request's departure to its first delta. Inter-token time of an output: from its first
  delta to its last one, over the tokens that came after the first delta.
- rounds: commits of one session; steps: forwards of the verifier, each with the rows of many sessions.
- beside forward: a step's time less its forward's, mean.
- arithmetic tokens/s: tokens over the forwards' own time alone: what would be had if nothing else took time.
- predicted tokens/s: from a table of forward times, `C x tokens of a round / time of a forward of C x rows of a round`
  for C streams, tokens and rows of a round as they were measured.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specdec.bench.load_run import CellRecord, Output
from specdec.bench.scrape import Scrape, mean

VERIFIER = "verifier"
STEP_SECONDS = "specdec:verifier_step_seconds"
FORWARD_SECONDS = "specdec:verifier_forward_seconds"
STEP_ROWS = "specdec:verifier_step_rows"
DRAFT_BUDGET = "specdec:draft_budget"

ForwardTime = Callable[[int], float]
"""Seconds of a forward of so many rows."""


def cell_figures(record: CellRecord, forward_time: ForwardTime | None) -> dict[str, Any]:
    """Of one cell. Times that nobody measured are None."""
    outputs = record.outputs
    num_tokens = sum(len(output.token_ids) for output in outputs)
    rounds = [one for output in outputs for one in output.rounds]
    drafted = [one for one in rounds if one.num_draft_tokens]
    num_draft_tokens = sum(one.num_draft_tokens for one in drafted)
    num_accepted_tokens = sum(one.num_accepted_tokens for one in drafted)
    verifier = record.counters.get(VERIFIER, {})
    return {
        "num_streams": record.cell.num_streams,
        "label": record.cell.label,
        "repetition": record.cell.repetition,
        "num_outputs": len(outputs),
        "num_errors": len(record.errors),
        "num_tokens": num_tokens,
        "elapsed_s": record.elapsed_s,
        "tokens_per_s": num_tokens / record.elapsed_s,
        "steady_tokens_per_s": steady_tokens_per_s(outputs),
        "first_token_ms": _percentiles([output.arrivals[0][0] - output.asked_s for output in outputs]),
        "inter_token_ms": _percentiles(filter(None, map(inter_token_s, outputs))),
        "rounds_per_s": len(rounds) / record.elapsed_s,
        "round_ms": _percentiles([one.total_time_s for one in rounds]),
        "share_of_rounds_with_draft": len(drafted) / len(rounds) if rounds else None,
        "draft_tokens_per_draft": num_draft_tokens / len(drafted) if drafted else None,
        "draft_budget": _mean_over(record.counters, DRAFT_BUDGET),
        "acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        "tokens_per_round": num_tokens / len(rounds) if rounds else None,
        "num_fallback_decodes": sum(output.statistics.num_fallback_decodes for output in outputs),
        "num_stale_drafts": sum(output.statistics.num_stale_drafts for output in outputs),
        "cpu_s": dict(record.cpu_s),
        "verifier": _verifier_figures(verifier, record.elapsed_s),
        "arithmetic_tokens_per_s": _over(num_tokens, verifier.get(f"{FORWARD_SECONDS}_sum", 0.0)),
        "predicted_tokens_per_s": _predicted(record, len(rounds), num_tokens, num_draft_tokens, forward_time),
    }


def inter_token_s(output: Output) -> float | None:
    """None where all came with the first delta."""
    num_later = len(output.token_ids) - output.arrivals[0][1]
    return (output.arrivals[-1][0] - output.arrivals[0][0]) / num_later if num_later else None


def steady_tokens_per_s(outputs: Sequence[Output]) -> float | None:
    """None where no stretch is common to all streams."""
    if not outputs:
        return None
    last_index = max(output.key[1] for output in outputs)
    begin_s = max((output.arrivals[0][0] for output in outputs if output.key[1] == 0), default=math.inf)
    end_s = min(output.arrivals[-1][0] for output in outputs if output.key[1] == last_index)
    if end_s <= begin_s:
        return None
    num_tokens = sum(
        count for output in outputs for arrived_s, count in output.arrivals if begin_s < arrived_s <= end_s
    )
    return num_tokens / (end_s - begin_s)


def num_mismatching(record: CellRecord, target_only: CellRecord) -> int:
    """Outputs that both have and that differ."""
    expected = {output.key: output.token_ids for output in target_only.outputs}
    return sum(output.token_ids != expected.get(output.key, output.token_ids) for output in record.outputs)


def _verifier_figures(counted: Scrape, elapsed_s: float) -> dict[str, float | None]:
    step_s, forward_s = mean(counted, STEP_SECONDS), mean(counted, FORWARD_SECONDS)
    return {
        "steps_per_s": counted.get(f"{STEP_SECONDS}_count", 0.0) / elapsed_s,
        "rows_per_step": mean(counted, STEP_ROWS),
        "step_ms": _ms(step_s),
        "forward_ms": _ms(forward_s),
        "beside_forward_ms": None if step_s is None or forward_s is None else 1000 * (step_s - forward_s),
    }


def _predicted(
    record: CellRecord, num_rounds: int, num_tokens: int, num_draft_tokens: int, forward_time: ForwardTime | None
) -> float | None:
    if forward_time is None or num_rounds == 0:
        return None
    num_streams = record.cell.num_streams
    forward_s = forward_time(round(num_streams * (1 + num_draft_tokens / num_rounds)))
    return _over(num_streams * num_tokens / num_rounds, forward_s)


def _mean_over(counters: Any, histogram: str) -> float | None:
    """Over all processes that have it."""
    total = sum(counted.get(f"{histogram}_sum", 0.0) for counted in counters.values())
    return _over(total, sum(counted.get(f"{histogram}_count", 0.0) for counted in counters.values()))


def _percentiles(times_s: Iterable[float]) -> dict[str, float | None]:
    """In milliseconds."""
    ordered = sorted(times_s)
    if not ordered:
        return {"p50": None, "p99": None}
    return {
        "p50": 1000 * statistics.median(ordered),
        "p99": 1000 * ordered[math.ceil(0.99 * len(ordered)) - 1],
    }


def _over(value: float, by: float) -> float | None:
    return value / by if by else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
