"""Outputs as a client received them, whole: text, ids, log-probabilities, times and what speculation brought. Pure."""

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from specdec.errors import MalformedRequestError
from specdec.messages import (
    Delta,
    Finished,
    GenerationEvent,
    PositionLogprobs,
    PromptLogprobs,
    RoundStatistics,
    Started,
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One output. `elapsed_s` runs from the request to its last frame, the prompt's forward included.

    `logprobs` are of token_ids, `prompt_logprobs` of the prompt's tokens but the first; both empty unless asked for.
    """

    started: Started
    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[RoundStatistics, ...]
    finished: Finished
    first_token_s: float
    elapsed_s: float
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of all draft tokens; None without a draft."""
        speculative = self.finished.speculative
        drafted = speculative.num_draft_tokens
        return speculative.num_accepted_tokens / drafted if drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a round that had a draft, its next token included; None without a draft."""
        speculative = self.finished.speculative
        return 1 + speculative.num_accepted_tokens / speculative.num_drafts if speculative.num_drafts else None

    def to_json(self) -> dict[str, Any]:
        """What `specdec generate --json` writes of one output, and what it takes to have it again."""
        written = {
            "model": self.started.model,
            "seed": self.started.seed,
            "acceptance_rule": self.started.acceptance_rule.value,
            "numerics_fingerprint": self.started.numerics_fingerprint,
            "numerics_changed": self.finished.numerics_changed,
            "num_failovers": self.finished.num_failovers,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finished.reason.value,
            "usage": dataclasses.asdict(self.finished.usage),
            "speculative": {
                **dataclasses.asdict(self.finished.speculative),
                "acceptance_rate": self.acceptance_rate,
                "acceptance_length": self.acceptance_length,
            },
        }
        if self.logprobs:
            written["logprobs"] = [_logprobs_to_json(position) for position in self.logprobs]
        if self.prompt_logprobs:
            written["prompt_logprobs"] = [_logprobs_to_json(position) for position in self.prompt_logprobs]
        return written


def _logprobs_to_json(position: PositionLogprobs) -> dict[str, Any]:
    alternatives = [dataclasses.asdict(token) for token in position.alternatives]
    return {**dataclasses.asdict(position.chosen), "alternatives": alternatives}


async def collect(
    events: AsyncIterator[GenerationEvent],
    on_event: Callable[[GenerationEvent], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Reads a stream of one output to its end, showing each frame to `on_event`.

    Raises:
        MalformedRequestError: the stream lacks its first or last frame.
        SpecdecError: as the stream does.
    """
    [answer] = await collect_samples(events, 1, on_event, clock=clock)
    return answer


async def collect_samples(
    events: AsyncIterator[GenerationEvent],
    num_samples: int,
    on_event: Callable[[GenerationEvent], None] = lambda event: None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
    clock: Callable[[], float] = time.monotonic,
) -> Sequence[Answer]:
    """The same for several samples, in order; `on_answer` is told each one as soon as it is whole."""
    began = clock()
    started: Started | None = None
    prompt_logprobs: list[PositionLogprobs] = []
    deltas: list[list[Delta]] = [[] for _ in range(num_samples)]
    first_token_s = [0.0] * num_samples
    answers: dict[int, Answer] = {}
    async for event in events:
        if isinstance(event, Delta | Finished) and event.sample_index >= num_samples:
            raise MalformedRequestError("the stream has more samples than were asked for")
        on_event(event)
        match event:
            case Started():
                started = event
            case PromptLogprobs():
                prompt_logprobs += event.logprobs
            case Delta(sample_index=index):
                first_token_s[index] = first_token_s[index] or clock() - began
                deltas[index].append(event)
            case Finished(sample_index=index) if started is not None:
                answers[index] = Answer(
                    started=started,
                    text="".join(delta.text for delta in deltas[index]) + event.text,
                    token_ids=tuple(token_id for delta in deltas[index] for token_id in delta.token_ids),
                    rounds=tuple(delta.round for delta in deltas[index]),
                    finished=event,
                    first_token_s=first_token_s[index],
                    elapsed_s=clock() - began,
                    logprobs=tuple(position for delta in deltas[index] for position in delta.logprobs),
                    prompt_logprobs=tuple(prompt_logprobs) if index == 0 else (),
                )
                on_answer(answers[index])
        if len(answers) == num_samples:
            return [answers[index] for index in range(num_samples)]
    raise MalformedRequestError("the stream ended without its last frame")
