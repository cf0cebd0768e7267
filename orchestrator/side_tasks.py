"""Tasks that run beside something and end with it."""

import asyncio
from collections.abc import Coroutine

import structlog

from specdec.errors import SpecdecError

_log = structlog.get_logger(__name__)


def begin_beside(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Nobody waits for its outcome: a defect that ends it is told in the log, once and at once."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_defect)
    return task


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Returns when the task has ended, whatever it ended with."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _tell_defect(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, SpecdecError):
        _log.error("side_task_failed", task=task.get_name(), error=type(error).__name__, exc_info=error)
