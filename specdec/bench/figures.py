"""The figures of one lane on some prompts. Pure. Definitions that the JSON's readers rely on:

- tokens/s, end to end: output tokens over the time from the request's departure to the end of the output.
- tokens/s, decode only: tokens after the first delta over the time from the first delta to the last one.
- speed-up of a prompt: speculative over target-only tokens/s; of a category: the median over its prompts.
- acceptance rate: accepted over verified draft tokens, summed; per position likewise.
- acceptance length: tokens committed by a round that verified a draft, the next token included; mean.
- round times: medians over rounds that verified a draft. An output's first round is left out: its total holds the
  prefill. `other` is total less verify_forward, draft and round_trip; `beside_forward` is total less verify_forward and
  draft. Each is a median of its own, so the parts do not add up exactly. Where a draft was made while the verifier ran
  (overlap), its time is not part of the total, and `other` and `beside_forward` come out too small, even below 0.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from specdec.bench.records import Generation
from specdec.messages import RoundStatistics

Pair = tuple[Generation, Generation]
"""Target-only and speculative, of one prompt."""


def tokens_per_s(generation: Generation) -> float:
    return len(generation.token_ids) / generation.elapsed_s


def decode_tokens_per_s(generation: Generation) -> float | None:
    """None where the whole output came with the first delta."""
    num_tokens = len(generation.token_ids) - generation.num_first_tokens
    elapsed_s = generation.last_tokens_s - generation.first_tokens_s
    return num_tokens / elapsed_s if num_tokens > 0 and elapsed_s > 0 else None


def speedup(pair: Pair, rate: Callable[[Generation], float | None] = tokens_per_s) -> float | None:
    target_only, speculative = (rate(generation) for generation in pair)
    return speculative / target_only if speculative and target_only else None


def first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that only one has or that differs; None where they are equal."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return None if len(some) == len(others) else min(len(some), len(others))


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None where none is."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def acceptance_rate(generations: Sequence[Generation]) -> float | None:
    num_draft_tokens = sum(generation.statistics.num_draft_tokens for generation in generations)
    num_accepted_tokens = sum(generation.statistics.num_accepted_tokens for generation in generations)
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else None


def acceptance_rate_per_position(generations: Sequence[Generation]) -> list[float]:
    """As long as the longest draft; positions are places in a draft."""
    accepted = _sum_by_place(generation.statistics.num_accepted_tokens_per_pos for generation in generations)
    drafted = _sum_by_place(generation.statistics.num_draft_tokens_per_pos for generation in generations)
    return [part / whole if whole else 0.0 for part, whole in zip_longest(accepted, drafted, fillvalue=0) if whole]


def acceptance_length(generations: Sequence[Generation]) -> float | None:
    """Accepted tokens of a round that had a draft, and one for the next token."""
    num_drafts = sum(generation.statistics.num_drafts for generation in generations)
    num_accepted_tokens = sum(generation.statistics.num_accepted_tokens for generation in generations)
    return 1 + num_accepted_tokens / num_drafts if num_drafts else None


def round_ms(generations: Sequence[Generation]) -> dict[str, float | None]:
    rounds = [
        statistic for generation in generations for statistic in generation.rounds[1:] if statistic.num_draft_tokens > 0
    ]
    parts: dict[str, Callable[[RoundStatistics], float]] = {
        "total": lambda one: one.total_time_s,
        "verify_forward": lambda one: one.verify_forward_time_s,
        "draft": lambda one: one.draft_time_s or 0.0,
        "round_trip": lambda one: one.round_trip_time_s or 0.0,
        "other": lambda one: _beside_forward_s(one) - (one.round_trip_time_s or 0.0),
        "beside_forward": _beside_forward_s,
        "queue": lambda one: one.queue_time_s,
    }
    return {name: _ms(median(part(one) for one in rounds)) for name, part in parts.items()}


def _beside_forward_s(one: RoundStatistics) -> float:
    return one.total_time_s - one.verify_forward_time_s - (one.draft_time_s or 0.0)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _sum_by_place(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
