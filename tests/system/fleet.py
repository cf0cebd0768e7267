"""Verifiers without models, any of which may be lost, and a client that reads on meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from specdec.local_store import free_port
from tests.system.fakes import (
    FakeSession,
    FakeVerifier,
    served_verifier,
    tokenise,
)
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    PROMPT,
    SLOW_S,
    Answer,
    eventually,
    frames,
)

PROMPT_IDS = tokenise(PROMPT)
STANDS_STILL_S = 60.0
"""Between two rounds: nothing is committed before the verifier is lost."""


class Fleet:
    """Verifiers that may be lost one by one, by their number."""

    def __init__(self, verifiers: Sequence[FakeVerifier]) -> None:
        self.verifiers = list(verifiers)
        self._endpoints = [f"127.0.0.1:{free_port()}" for _ in verifiers]
        self._servers = [contextlib.AsyncExitStack() for _ in verifiers]

    @property
    def endpoints(self) -> list[str]:
        return list(self._endpoints)

    async def start(self, number: int) -> None:
        serving = served_verifier(self.verifiers[number], self._endpoints[number])
        await self._servers[number].enter_async_context(serving)

    async def lose(self, number: int) -> None:
        await self._servers[number].aclose()

    async def holder(self, num_sessions: int = 1) -> int:
        """Who was the last to take a session, once so many were taken in all."""

        async def look() -> bool:
            return sum(len(verifier.sessions) for verifier in self.verifiers) >= num_sessions

        await eventually(look)
        (number,) = (number for number, verifier in enumerate(self.verifiers) if not _are_closed(verifier.sessions))
        return number


def _are_closed(sessions: Sequence[FakeSession]) -> bool:
    return all(session.closed.is_set() for session in sessions)


@contextlib.asynccontextmanager
async def fleet(*verifiers: FakeVerifier, num_started: int | None = None) -> AsyncIterator[Fleet]:
    """Serves the first so many of them, None: all."""
    some = Fleet(verifiers)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(len(verifiers)):
            stack.push_async_callback(some.lose, number)
        for number in range(len(verifiers) if num_started is None else num_started):
            await some.start(number)
        yield some


def slow_verifiers(number: int = 2, **options: float) -> list[FakeVerifier]:
    return [FakeVerifier(**{"round_s": SLOW_S, **options}) for _ in range(number)]  # type: ignore[arg-type]


def hurry(some: Fleet) -> None:
    for verifier in some.verifiers:
        verifier.round_s = 0.0


async def read_to_the_end(call: object, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames(call):
            answer.add(frame)
    assert answer.finished is not None
    return answer
