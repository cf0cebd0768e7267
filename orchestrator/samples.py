"""The samples of one request: the frames of several sessions as one stream, and where those sessions go.

Each sample is a session with a record, a lease and a drafter of its own. Knows how their streams become one; knows
nothing of verifiers, records or what a frame says.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

from orchestrator.outbox import Outbox
from specdec.errors import SpecdecError
from specdec.ids import SessionId
from specdec.messages import GenerationEvent, Started


@dataclasses.dataclass
class Placement:
    """The verifier that took one of the samples, and the prompt as it read it. The others follow it there, so that one
    prefill and one tokenised prompt serve all. Whoever holds `deciding` while there is no endpoint yet may choose."""

    deciding: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    endpoint: str = ""
    prompt_token_ids: tuple[int, ...] = ()


class SampleStream:
    """One stream of all samples: Started once, then their frames as they come; it ends when each sample has ended.

    The first sample that fails ends it with that error, and `on_failed` is to end the others.
    """

    def __init__(
        self, session_id: SessionId, sample_ids: Sequence[SessionId], capacity: int, on_failed: Callable[[], object]
    ) -> None:
        self._session_id = session_id
        self._sample_ids = tuple(sample_ids)
        self._on_failed = on_failed
        self._merged = Outbox(capacity * len(self._sample_ids))
        self._num_running = len(self._sample_ids)
        self._started = False
        self._over = False
        self.outboxes = tuple(SampleOutbox(self) for _ in self._sample_ids)
        """One for each sample, in order."""

    def frames(self) -> AsyncGenerator[GenerationEvent, None]:
        return self._merged.frames()

    def put(self, frame: GenerationEvent) -> None:
        """Raises SlowReaderError as an Outbox does."""
        if self._over:
            return
        if isinstance(frame, Started):
            if self._started:
                return  # seed, rule, prompt and verifier are the same for all
            self._started = True
            frame = dataclasses.replace(frame, session_id=self._session_id, sample_session_ids=self._sample_ids)
        self._merged.put(frame)

    def sample_ended(self, error: SpecdecError | None) -> None:
        self._num_running -= 1
        if self._over or (error is None and self._num_running > 0):
            return
        self._over = True
        self._merged.close(error)
        if error is not None:
            self._on_failed()


class SampleOutbox:
    """What one sample's session writes to."""

    def __init__(self, stream: SampleStream) -> None:
        self._stream = stream
        self._closed = False

    def put(self, frame: GenerationEvent) -> None:
        self._stream.put(frame)

    def close(self, error: SpecdecError | None = None) -> None:
        """Only the first call counts."""
        if not self._closed:
            self._closed = True
            self._stream.sample_ended(error)
