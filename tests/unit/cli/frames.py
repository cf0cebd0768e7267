"""Frames of a stream as the tests of this room need them."""

from collections.abc import AsyncIterator, Iterable, Sequence

from specdec.ids import SessionId
from specdec.messages import (
    Delta,
    Finished,
    GenerationEvent,
    RoundStatistics,
    SpeculativeStatistics,
    Started,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason, NextTokenKind

STARTED = Started(
    session_id=SessionId("s"),
    model="m",
    seed=1,
    acceptance_rule=AcceptanceRule.GREEDY,
    num_prompt_tokens=3,
    numerics_fingerprint="f",
)


def delta(
    texts: Sequence[str], num_accepted: int, kind: NextTokenKind | None, *, position: int = 3, with_texts: bool = True
) -> Delta:
    statistics = RoundStatistics(
        num_draft_tokens=4,
        num_accepted_tokens=num_accepted,
        next_token_kind=kind,
        total_time_s=0.1,
        verify_forward_time_s=0.05,
        queue_time_s=0.0,
    )
    return Delta(
        text="".join(texts),
        token_ids=tuple(range(len(texts))),
        position=position,
        round=statistics,
        token_texts=tuple(texts) if with_texts else (),
    )


def finished(text: str = "", **statistics: int) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH,
        usage=Usage(num_prompt_tokens=3, num_output_tokens=2),
        speculative=SpeculativeStatistics(**statistics),
        text=text,
    )


async def stream(events: Iterable[GenerationEvent]) -> AsyncIterator[GenerationEvent]:
    for event in events:
        yield event
