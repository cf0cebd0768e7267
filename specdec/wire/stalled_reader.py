"""Cut off a caller that takes nothing of its stream for too long.

While gRPC waits to write, a handler cannot notice anything: flow control holds it, and what it holds, for as long as
the caller keeps its connection. Knows no message.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import grpc.aio

from specdec.errors import SlowReaderError
from specdec.wire.interceptors import abort

Response = TypeVar("Response")


async def unless_stalled(
    responses: AsyncGenerator[Response, None],
    context: grpc.aio.ServicerContext[Any, Any],
    method: str,
    *,
    stall_s: float,
) -> AsyncGenerator[Response, None]:
    """The same responses. Where one is not taken for `stall_s`, the call ends: `responses` is closed, and the caller is
    told SLOW_READER after what is on its way already, if it ever reads again."""
    handler = asyncio.current_task()
    loop = asyncio.get_running_loop()
    cutting: set[asyncio.Task[None]] = set()

    async def cut_off() -> None:
        telling = asyncio.create_task(abort(SlowReaderError(f"nothing was read for {stall_s:g} s"), context, method))
        await asyncio.sleep(0)  # the status is on its way behind the message that nobody takes
        if handler is not None:
            handler.cancel()
        await responses.aclose()
        await asyncio.gather(telling, return_exceptions=True)  # ends with the connection at the latest

    def begin_to_cut_off() -> None:
        task = asyncio.create_task(cut_off(), name=f"cut off {method}")
        cutting.add(task)
        task.add_done_callback(cutting.discard)

    try:
        async for response in responses:
            timer = loop.call_later(stall_s, begin_to_cut_off)
            try:
                yield response
            finally:
                timer.cancel()
    finally:
        if not cutting:
            await responses.aclose()
