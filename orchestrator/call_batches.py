"""Calls that travel together: those that come while a batch is under way are the next one.

So a lone call goes at once, and a burst of them costs little more than one. Knows no store and no deadline; `send` has
both. Bounded by its callers, who wait for their replies.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

MAX_CALLS = 256
"""Of one batch: what one server takes in without keeping the others waiting."""

Call = TypeVar("Call")
Reply = TypeVar("Reply")


class CallBatches(Generic[Call, Reply]):
    """`send` takes a batch and answers each call, with its reply or an exception; what it raises is every call's."""

    def __init__(self, send: Callable[[Sequence[Call]], Awaitable[Sequence[Reply | Exception]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Call, asyncio.Future[Reply]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def call(self, call: Call) -> Reply:
        """The reply to this call. One whose caller gave up before its batch began is not sent."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, reply))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all())
        return await reply

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_CALLS], self._waiting[MAX_CALLS:]
                wanted = [(call, reply) for call, reply in batch if not reply.done()]
                if wanted:
                    await self._send_batch([call for call, _ in wanted], [reply for _, reply in wanted])
        finally:
            self._sender = None

    async def _send_batch(self, calls: Sequence[Call], futures: Sequence["asyncio.Future[Reply]"]) -> None:
        replies: Sequence[Reply | Exception]
        try:
            replies = await self._send(calls)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        except Exception as error:
            replies = [error] * len(calls)
        for future, reply in zip(futures, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
