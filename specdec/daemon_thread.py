"""Blocking work beside the event loop that must not keep the process alive: a load takes minutes, SIGTERM does not."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """The function's result or its error. The thread, unlike that of asyncio.to_thread, never delays an exit."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # None only beside an error, or where T is None

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            return  # the loop is closed: the process is ending and nobody waits

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
