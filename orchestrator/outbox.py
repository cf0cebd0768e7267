"""Frames on their way to one client. Bounded: a client that does not read loses its stream, not our memory."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Protocol

from specdec.errors import SlowReaderError, SpecdecError
from specdec.messages import GenerationEvent


class FrameSink(Protocol):
    """Where a session's frames go."""

    def put(self, frame: GenerationEvent) -> None:
        """Raises SlowReaderError where the reader is too far behind."""

    def close(self, error: SpecdecError | None = None) -> None:
        """Nothing follows; only the first call counts."""


class Outbox:
    """One writer, one reader. What was put before `close` is still read; then the stream ends, or raises the error."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: deque[GenerationEvent] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._error: SpecdecError | None = None

    def put(self, frame: GenerationEvent) -> None:
        """Raises SlowReaderError where the reader is `capacity` frames behind."""
        if len(self._frames) >= self._capacity:
            raise SlowReaderError(f"the reader is {self._capacity} frames behind")
        self._frames.append(frame)
        self._wake.set()

    def close(self, error: SpecdecError | None = None) -> None:
        """Only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake.set()

    async def frames(self) -> AsyncGenerator[GenerationEvent, None]:
        while True:
            while self._frames:
                yield self._frames.popleft()
            if self._closed:
                break
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error
