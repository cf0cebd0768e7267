"""Work that a signal ends early, and in order: what it has so far is kept."""

import asyncio
import signal
from collections.abc import Coroutine


async def run_until_signal(work: Coroutine[None, None, None]) -> bool:
    """Whether the work came to its own end; not where Ctrl-C or SIGTERM ended it. What it raises passes through."""
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True
