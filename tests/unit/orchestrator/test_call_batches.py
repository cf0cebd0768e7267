"""Calls that travel together."""

import asyncio
from collections.abc import Sequence

import pytest

from orchestrator.call_batches import CallBatches


class Doubling:
    """Answers each number with its double, when it may; fails at 0."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.has_begun = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def send(self, numbers: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(numbers))
        self.has_begun.set()
        await self.may_answer.wait()
        return [2 * number if number else ZeroDivisionError("zero") for number in numbers]


async def test_calls_that_come_while_a_batch_is_under_way_are_the_next_one():
    server = Doubling()
    batches = CallBatches(server.send)
    calls = [asyncio.create_task(batches.call(1))]
    await server.has_begun.wait()
    calls += [asyncio.create_task(batches.call(number)) for number in (2, 3, 4)]
    server.may_answer.set()
    assert await asyncio.gather(*calls) == [2, 4, 6, 8]
    assert server.batches == [[1], [2, 3, 4]]


async def test_a_call_that_fails_harms_no_other_and_the_next_batch_goes():
    server = Doubling()
    server.may_answer.set()
    batches = CallBatches(server.send)
    replies = await asyncio.gather(*(batches.call(number) for number in (0, 5)), return_exceptions=True)
    assert isinstance(replies[0], ZeroDivisionError)
    assert replies[1] == 10
    assert await batches.call(6) == 12


async def test_a_batch_that_cannot_be_sent_fails_for_each_of_its_calls_alone():
    async def refuse(numbers: Sequence[int]) -> Sequence[int | Exception]:
        raise ConnectionError(str(len(numbers)))

    batches = CallBatches(refuse)
    replies = await asyncio.gather(batches.call(1), batches.call(2), return_exceptions=True)
    assert [str(reply) for reply in replies] == ["2", "2"]
    with pytest.raises(ConnectionError):
        await batches.call(3)


async def test_a_call_that_was_given_up_before_its_turn_is_not_sent():
    server = Doubling()
    batches = CallBatches(server.send)
    first = asyncio.create_task(batches.call(1))
    await server.has_begun.wait()
    second, third = asyncio.create_task(batches.call(2)), asyncio.create_task(batches.call(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    server.may_answer.set()
    assert await asyncio.gather(first, third) == [2, 6]
    assert server.batches == [[1], [3]]
