"""An output, or several samples, through any of several orchestrators: where its stream breaks, it goes on at the next.

Knows what a client has received and after which errors it may come again; knows nothing of how frames are shown.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence

from specdec.errors import SpecdecError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, Started
from specdec.params import GenerationSpec
from specdec.replicas import ELSEWHERE, RESUMABLE, Replica

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_QUEUE_LIMIT = 64


class ResumingClient:
    """`generate` as GenerationClient has it. `replicas` share one session store; the first is asked first.

    A sample that got no token for `give_up_s`, in spite of all tries, ends with the last error. `on_break` is told each
    error that a stream was resumed after.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        give_up_s: float = 60.0,
        on_break: Callable[[SpecdecError], None] = lambda error: None,
    ) -> None:
        self._replicas = tuple(replicas)
        self._give_up_s = give_up_s
        self._on_break = on_break

    async def generate(self, spec: GenerationSpec) -> AsyncGenerator[GenerationEvent, None]:
        """One Started, then frames as if no stream had broken: no token twice, none missing. Raises as GenerationClient
        does, for what cannot be resumed."""
        received = _Received(spec.num_samples)
        for number, replica in enumerate(self._replicas, start=1):
            try:
                async with contextlib.aclosing(replica.generate(spec, uuid.uuid4().hex)) as events:
                    async for event in events:
                        received.note(event)
                        yield event
                return
            except RESUMABLE as error:
                if not received.sessions and (number == len(self._replicas) or not isinstance(error, ELSEWHERE)):
                    raise
                self._on_break(error)
            if received.sessions:
                break
        async with contextlib.aclosing(self._rest(spec, received)) as events:
            async for event in events:
                yield event

    async def _rest(self, spec: GenerationSpec, received: "_Received") -> AsyncGenerator[GenerationEvent, None]:
        """Frames of all samples that have not ended, as they come."""
        frames: asyncio.Queue[GenerationEvent | SpecdecError] = asyncio.Queue(_QUEUE_LIMIT)

        async def follow(index: int) -> None:
            try:
                async with contextlib.aclosing(self._rest_of(index, spec, received)) as events:
                    async for event in events:
                        await frames.put(event)
            except SpecdecError as error:
                await frames.put(error)

        unfinished = received.unfinished()
        tasks = [asyncio.create_task(follow(index)) for index in unfinished]
        try:
            num_left = len(unfinished)
            while num_left > 0:
                frame = await frames.get()
                if isinstance(frame, SpecdecError):
                    raise frame
                num_left -= isinstance(frame, Finished)
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rest_of(
        self, index: int, spec: GenerationSpec, received: "_Received"
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Deltas and Finished of one sample, through one replica after the other."""
        token_ids, session_id = received.token_ids[index], received.sessions[index]
        last_token_s, pause_s, turn = time.monotonic(), _FIRST_PAUSE_S, 1
        while True:
            num_before = len(token_ids)
            replica = self._replicas[turn % len(self._replicas)]
            try:
                async with contextlib.aclosing(replica.resume(session_id, tuple(token_ids), spec)) as events:
                    async for event in events:
                        if isinstance(event, Delta | Finished):
                            received.note(event)
                            yield event
                return
            except RESUMABLE as error:
                if len(token_ids) > num_before:
                    last_token_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
                wait_s = max(
                    pause_s, error.retry_after_s or 0.0
                )  # who was told when to come again is not let in before
                if time.monotonic() + wait_s - last_token_s > self._give_up_s:
                    raise
                self._on_break(error)
            await asyncio.sleep(wait_s)
            pause_s, turn = min(2 * pause_s, _MAX_PAUSE_S), turn + 1


class _Received:
    """What a client has of each sample."""

    def __init__(self, num_samples: int) -> None:
        self.sessions: tuple[SessionId, ...] = ()
        """Of each sample, once it has Started."""
        self.token_ids: list[list[int]] = [[] for _ in range(num_samples)]
        self._is_finished = [False] * num_samples

    def note(self, event: GenerationEvent) -> None:
        match event:
            case Started():
                self.sessions = tuple(event.sample_session_ids) or (event.session_id,)
            case Delta() if event.sample_index < len(self.token_ids):
                self.token_ids[event.sample_index] += event.token_ids
            case Finished() if event.sample_index < len(self._is_finished):
                self._is_finished[event.sample_index] = True

    def unfinished(self) -> list[int]:
        return [index for index, is_finished in enumerate(self._is_finished) if not is_finished]
