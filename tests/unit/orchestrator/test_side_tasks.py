"""What runs beside a stream does not fail unseen."""

import asyncio

import structlog.testing

from orchestrator.side_tasks import begin_beside, cancel_and_wait
from specdec.errors import FencedError


async def _fail(error: Exception) -> None:
    raise error


async def _events_of(error: Exception) -> list[tuple[str, str]]:
    with structlog.testing.capture_logs() as lines:
        task = begin_beside(_fail(error), "keep drafter s")
        await asyncio.wait([task])
        await asyncio.sleep(0)  # callbacks come after
        await cancel_and_wait(task)
    return [(line["event"], line["task"]) for line in lines]


async def test_a_defect_is_told_once_with_the_tasks_name() -> None:
    assert await _events_of(KeyError("a defect")) == [("side_task_failed", "keep drafter s")]


async def test_an_end_that_is_foreseen_is_nobodys_defect() -> None:
    assert await _events_of(FencedError("another owner has it")) == []


async def test_what_is_cancelled_with_its_stream_is_no_defect() -> None:
    with structlog.testing.capture_logs() as lines:
        task = begin_beside(asyncio.sleep(600), "write record s")
        await asyncio.sleep(0)
        await cancel_and_wait(task)
    assert task.cancelled()
    assert lines == []
