"""One session's loop against a verifier that the test plays, without a socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from drafter_service.attachment import Attachment, OutOfStepError
from drafter_service.device import DeviceThread
from drafter_service.draft_loop import WARM_CHUNK_TOKENS, DraftLoop, MisbehavedError
from drafter_service.proposers.base import NO_LIMITS, DraftLimits, Proposal
from drafter_service.shared_measurements import SharedMeasurements
from specdec.ids import DraftSequence
from specdec.messages import BudgetUpdate, Detached, DetachReason, Draft, DropReason, RefusalReason, Refused
from specdec.telemetry import DrafterMetrics
from tests.unit.drafter_service.messages import advance, attach_session, attached, dropped, verdict

DEADLINE_S = 10.0


class CountingSession:
    """Guesses that the text counts on: n is followed by n + 1. Its cache is as long as it was told to warm."""

    def __init__(self, *, needs_warming: bool = False) -> None:
        self.needs_warming = needs_warming
        self.has_guesses = True
        self.fails = False
        self.cached_length = 0
        self.warmed: list[int] = []
        self.observed: list[tuple[int, int]] = []
        self.asked_at: list[int] = []
        """How much was committed at each proposal."""

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        self.asked_at.append(len(committed_token_ids))
        if self.fails:
            raise RuntimeError("the proposer is broken")
        if not self.has_guesses or self.backlog(committed_token_ids) >= WARM_CHUNK_TOKENS:
            return Proposal(())
        last = committed_token_ids[-1]
        return Proposal(tuple(range(last + 1, last + 1 + min(3, max_tokens))))

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.observed.append((num_draft_tokens, num_accepted_tokens))

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        return max(0, len(committed_token_ids) - 1 - self.cached_length) if self.needs_warming else 0

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        self.warmed.append(len(committed_token_ids) - 1 - self.cached_length)
        self.cached_length = len(committed_token_ids) - 1

    def close(self) -> None:
        pass


async def until(condition: Callable[[], bool]) -> None:
    """Waits for work of the device thread, which tells nobody when it is done."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Bench:
    """The loop under test, and what it has sent."""

    def __init__(self, loop: DraftLoop, sent: "asyncio.Queue[Draft]", task: "asyncio.Task[None]") -> None:
        self.loop = loop
        self.sent = sent
        self.task = task

    async def next_draft(self) -> Draft:
        return await asyncio.wait_for(self.sent.get(), DEADLINE_S)

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, DEADLINE_S)


@asynccontextmanager
async def running(
    session: CountingSession, known: Sequence[int] = (1, 2, 3), draft_budget: int = 8
) -> AsyncIterator[Bench]:
    sent: asyncio.Queue[Draft] = asyncio.Queue()
    device = DeviceThread()
    attachment = Attachment(attach_session(known), attached(start_position=len(known), draft_budget=draft_budget))
    loop = DraftLoop(
        attachment, session, device, sent.put_nowait, SharedMeasurements(), DrafterMetrics(), max_draft_tokens=8
    )
    task = asyncio.create_task(loop.run())
    try:
        yield Bench(loop, sent, task)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await device.close()


async def test_a_draft_goes_out_at_once_and_the_next_one_after_its_verdict() -> None:
    session = CountingSession()
    async with running(session) as bench:
        first = await bench.next_draft()
        assert (first.start_position, tuple(first.draft_token_ids)) == (3, (4, 5, 6))
        assert bench.sent.empty()
        bench.loop.receive(verdict(1, 3, [4, 5, 9], num_accepted=2))
        second = await bench.next_draft()
        assert (second.draft_sequence, second.start_position) == (2, 6)
        bench.loop.receive(verdict(2, 6, [10, 11, 12, 13], num_accepted=3))
        third = await bench.next_draft()
        assert third.start_position == 10


async def test_a_guess_that_had_to_queue_for_the_device_is_made_for_what_is_committed_by_then() -> None:
    session = CountingSession()
    async with running(session) as bench:
        await bench.next_draft()
        gate = threading.Event()
        blocked = bench.loop._device.run(gate.wait)
        bench.loop.receive(verdict(1, 3, [4, 5, 6, 7], num_accepted=3))
        await asyncio.sleep(0.02)
        bench.loop.receive(advance(7, [20, 21]))
        gate.set()
        draft = await bench.next_draft()
        assert (draft.start_position, tuple(draft.draft_token_ids)) == (9, (22, 23, 24))
        assert session.asked_at == [3, 9]
        assert await blocked


async def test_what_became_of_a_guess_is_told_to_the_proposer_before_it_guesses_again() -> None:
    session = CountingSession()
    async with running(session) as bench:
        await bench.next_draft()
        bench.loop.receive(verdict(1, 3, [4, 5, 9], num_accepted=2))
        await bench.next_draft()
        assert session.observed == [(3, 2)]


async def test_where_there_is_no_guess_an_empty_draft_says_so() -> None:
    session = CountingSession()
    session.has_guesses = False
    async with running(session) as bench:
        draft = await bench.next_draft()
        assert (draft.start_position, tuple(draft.draft_token_ids)) == (3, ())


async def test_without_a_budget_nothing_is_sent_until_it_rises() -> None:
    async with running(CountingSession(), draft_budget=0) as bench:
        bench.loop.receive(advance(3, [4], draft_budget=0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.sent.empty()
        bench.loop.receive(BudgetUpdate(2))
        draft = await bench.next_draft()
        assert tuple(draft.draft_token_ids) == (5, 6)


async def test_a_dropped_draft_is_followed_by_one_where_the_verifier_stands() -> None:
    async with running(CountingSession()) as bench:
        await bench.next_draft()
        bench.loop.receive(dropped(1, DropReason.HEAD_DIFFERS, 5, [20, 21]))
        draft = await bench.next_draft()
        assert (draft.start_position, draft.draft_token_ids[0]) == (5, 22)


async def test_a_cache_that_is_behind_is_warmed_in_chunks_while_drafts_are_empty() -> None:
    session = CountingSession(needs_warming=True)
    known = list(range(100))
    async with running(session, known) as bench:
        assert tuple((await bench.next_draft()).draft_token_ids) == ()
        await until(lambda: session.backlog(known) < WARM_CHUNK_TOKENS)
        bench.loop.receive(verdict(1, 100, [100], num_accepted=0))
        bench.loop.receive(advance(101, [101]))
        async with asyncio.timeout(DEADLINE_S):
            sequence = 2
            while not (draft := await bench.next_draft()).draft_token_ids:
                bench.loop.receive(verdict(sequence, draft.start_position, [draft.start_position], num_accepted=0))
                sequence += 1
        assert min(session.warmed) >= WARM_CHUNK_TOKENS


async def test_with_a_budget_of_0_the_cache_is_kept_warm_in_chunks_not_token_by_token() -> None:
    session = CountingSession(needs_warming=True)
    async with running(session, draft_budget=0) as bench:
        for position in range(3, 3 + 3 * WARM_CHUNK_TOKENS):
            bench.loop.receive(advance(position, [position], draft_budget=0))
            await asyncio.sleep(0.001)
        await until(lambda: session.cached_length >= 2 * WARM_CHUNK_TOKENS)
        assert min(session.warmed) >= WARM_CHUNK_TOKENS


async def test_the_loop_ends_when_the_attachment_is_over() -> None:
    async with running(CountingSession()) as bench:
        await bench.next_draft()
        bench.loop.receive(Detached(DetachReason.SESSION_ENDED))
        await bench.ended()


async def test_a_broken_proposer_ends_its_loop_with_its_own_error() -> None:
    session = CountingSession()
    session.fails = True
    async with running(session) as bench:
        with pytest.raises(RuntimeError):
            await bench.ended()


async def test_messages_that_do_not_fit_are_told_to_the_caller() -> None:
    async with running(CountingSession()) as bench:
        await bench.next_draft()
        with pytest.raises(OutOfStepError):
            bench.loop.receive(advance(9, [1]))


async def test_a_drafter_whose_drafts_are_refused_again_and_again_gives_up() -> None:
    async with running(CountingSession()) as bench:
        for sequence in (1, 2, 3):
            await bench.next_draft()
            refused = Refused(DraftSequence(sequence), RefusalReason.TOO_MANY_NODES, "", 3, (), 8)
            if sequence < 3:
                bench.loop.receive(refused)
            else:
                with pytest.raises(MisbehavedError):
                    bench.loop.receive(refused)
