"""A bounded queue from the device's thread to one stream's handler. What does not fit marks the reader as too slow."""

import asyncio
from typing import Generic, TypeVar

from specdec.errors import SlowReaderError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Filled and read on the event loop's thread. Raises SlowReaderError from `get` once something did not fit."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: asyncio.Queue[T | None] = asyncio.Queue()
        self._overflowed = False
        self._closed = False

    def put(self, item: T) -> None:
        """Never blocks. After an overflow or `close` items are let go: their reader is being cut off."""
        if self._closed or self._overflowed:
            return
        if self._items.qsize() >= self._capacity:
            self._overflowed = True
            return
        self._items.put_nowait(item)

    def close(self) -> None:
        """Ends the reader after what is in the queue."""
        if not self._closed:
            self._closed = True
            self._items.put_nowait(None)

    async def get(self) -> T | None:
        """The next item; None once closed."""
        if self._overflowed:
            raise SlowReaderError(f"more than {self._capacity} messages were waiting to be read")
        return await self._items.get()
