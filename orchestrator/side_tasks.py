"""Tasks that run beside something and end with it."""

import asyncio


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Returns when the task has ended, whatever it ended with."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
