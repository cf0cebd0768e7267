"""Streams of several samples becoming one."""

import dataclasses

import pytest

from orchestrator.samples import SampleStream
from specdec.errors import OverloadedError, SlowReaderError, SpecdecError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, RoundStatistics, SpeculativeStatistics, Started, Usage
from specdec.params import AcceptanceRule, FinishReason

NAMES = (SessionId("s.0"), SessionId("s.1"))
STARTED = Started(NAMES[1], "m", 7, AcceptanceRule.COUPLED, 3, "f")
ROUND = RoundStatistics(0, 0, None, 0.0, 0.0, 0.0)


def delta(sample_index: int, position: int = 3) -> Delta:
    return Delta("", (1,), position, ROUND, sample_index=sample_index)


def finished(sample_index: int) -> Finished:
    return Finished(FinishReason.LENGTH, Usage(3, 1), SpeculativeStatistics(), "", sample_index)


class Watched:
    """A stream of two samples, and how often it told that one failed."""

    def __init__(self, capacity: int = 8) -> None:
        self.num_failures = 0
        self.stream = SampleStream(SessionId("s"), NAMES, capacity, self._failed)

    def _failed(self) -> None:
        self.num_failures += 1
        for outbox in self.stream.outboxes:  # what is stopped closes without an error
            outbox.close()

    async def read(self) -> tuple[list[GenerationEvent], SpecdecError | None]:
        frames: list[GenerationEvent] = []
        try:
            async for frame in self.stream.frames():
                frames.append(frame)
        except SpecdecError as error:
            return frames, error
        return frames, None


async def test_whichever_sample_begins_first_begins_the_stream_and_the_others_do_not() -> None:
    watched = Watched()
    first, second = watched.stream.outboxes
    second.put(STARTED)
    second.put(delta(1))
    first.put(dataclasses.replace(STARTED, session_id=NAMES[0]))
    first.put(delta(0))
    for index, outbox in enumerate((first, second)):
        outbox.put(finished(index))
        outbox.close()
        outbox.close()  # a session may say so again
    frames, error = await watched.read()
    begun = dataclasses.replace(STARTED, session_id=SessionId("s"), sample_session_ids=NAMES)
    assert frames == [begun, delta(1), delta(0), finished(0), finished(1)]
    assert (error, watched.num_failures) == (None, 0)


async def test_the_first_failure_ends_the_stream_behind_what_was_said_before_and_ends_the_others_once() -> None:
    watched = Watched()
    first, second = watched.stream.outboxes
    first.put(STARTED)
    first.put(delta(0))
    second.close(OverloadedError("no"))
    first.put(delta(0, 4))
    first.close(SpecdecError("another"))
    frames, error = await watched.read()
    assert [type(frame) for frame in frames] == [Started, Delta]
    assert isinstance(error, OverloadedError)
    assert watched.num_failures == 1


async def test_a_reader_may_be_as_far_behind_as_each_sample_allows_and_no_further() -> None:
    first, second = Watched(capacity=2).stream.outboxes
    for position in range(2):
        first.put(delta(0, position))
        second.put(delta(1, position))
    with pytest.raises(SlowReaderError):
        second.put(delta(1, 2))
