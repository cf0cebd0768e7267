"""The one thread that owns the model: proposals and warming run there in turn, the event loop never waits for them.

Its queue is bounded by the number of attachments, since each has at most one call in it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs functions one after another, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Queues a call; the future is the running loop's."""
        return asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def run_and_forget(self, function: Callable[[], None]) -> None:
        """Queues a call that frees something, behind all that was queued before."""
        self._executor.submit(function)

    async def close(self) -> None:
        """Returns after the last call has ended."""
        await asyncio.to_thread(self._executor.shutdown, wait=True)
