"""Measuring that a signal ends early, and in order: what was measured so far is reported."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Protocol


class Ended(Protocol):
    """A recording that says how it came to its end."""

    complete: bool
    ended_by: str


async def measure_until_signal(work: Coroutine[None, None, None], recording: Ended) -> None:
    """Ctrl-C and SIGTERM end the work, not the report. What the work raises is noted and passes through."""
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        recording.ended_by = "interrupted"
    except Exception as error:
        recording.ended_by = f"{type(error).__name__}: {error}"
        raise
    else:
        recording.complete = True
