"""One output as a client received it, whole: text, ids, times and what speculation brought. Pure."""

import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from specdec.errors import MalformedRequestError
from specdec.messages import Delta, Finished, GenerationEvent, RoundStatistics, Started


@dataclasses.dataclass(frozen=True)
class Answer:
    """`elapsed_s` runs from the request to the last frame, the prompt's forward included."""

    started: Started
    text: str
    token_ids: tuple[int, ...]
    rounds: tuple[RoundStatistics, ...]
    finished: Finished
    first_token_s: float
    elapsed_s: float

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
        """What `specdec generate --json` writes."""
        return {
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


async def collect(
    events: AsyncIterator[GenerationEvent],
    on_event: Callable[[GenerationEvent], None] = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Reads a stream to its end, showing each frame to `on_event`.

    Raises:
        MalformedRequestError: the stream lacks its first or last frame.
        SpecdecError: as the stream does.
    """
    began = clock()
    started: Started | None = None
    deltas: list[Delta] = []
    first_token_s = 0.0
    async for event in events:
        on_event(event)
        match event:
            case Started():
                started = event
            case Delta():
                first_token_s = first_token_s or clock() - began
                deltas.append(event)
            case Finished() if started is not None:
                return Answer(
                    started=started,
                    text="".join(delta.text for delta in deltas) + event.text,
                    token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
                    rounds=tuple(delta.round for delta in deltas),
                    finished=event,
                    first_token_s=first_token_s,
                    elapsed_s=clock() - began,
                )
    raise MalformedRequestError("the stream ended without its last frame")
