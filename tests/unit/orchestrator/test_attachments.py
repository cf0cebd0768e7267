"""A session's drafter is kept attached; drafters here are scripted calls, and the verifier's word is given by hand."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from typing import cast

import pytest

from orchestrator.attach_attempt import AttachFacts
from orchestrator.attachments import DrafterKeeper
from orchestrator.breaker import Outcome, outcome_of
from orchestrator.circuits import Circuits
from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from orchestrator.routing import Routing
from specdec.errors import AttachRefusedError, PeerUnavailableError, SpecdecError
from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import AttachmentChange, AttachmentState, AttachSession, DetachReason, ServerStatus
from specdec.messages.cluster import Role
from specdec.params import AcceptanceRule, GenerationSpec

VERIFIER = "v:1"
FACTS = AttachFacts(
    SessionId("s"), Epoch(1), b"k" * 32, VERIFIER, "f", GenerationSpec("p"), AcceptanceRule.GREEDY, 1, 0
)


class ScriptedDrafter:
    """Answers an attach once it is told to, and counts who joined and who left as a verifier would see it."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.refusal: SpecdecError | None = None
        self.asked: list[int] = []
        self.joined: list[int] = []
        self.left: list[int] = []
        self.cancelled: list[int] = []
        self.changed = asyncio.Condition()

    async def attach_session(self, request: AttachSession, timeout_s: float) -> None:
        await self._add(self.asked, request.attachment_id)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.attachment_id)
            raise
        if self.refusal is not None:
            raise self.refusal
        await self._add(self.joined, request.attachment_id)

    async def detach_session(self, session_id: SessionId, attachment_id: AttachmentId, timeout_s: float) -> None:
        await self._add(self.left, attachment_id)

    async def _add(self, names: list[int], attachment_id: int) -> None:
        async with self.changed:
            names.append(attachment_id)
            self.changed.notify_all()

    async def until(self, names: list[int], number: int) -> None:
        async with asyncio.timeout(5.0), self.changed:
            await self.changed.wait_for(lambda: len(names) >= number)


class ScriptedCluster:
    """The part of a cluster that a keeper sees."""

    def __init__(self, **drafters: ScriptedDrafter) -> None:
        self.peers = drafters
        self.circuits = Circuits()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.change = asyncio.Event()
        status = ServerStatus(True, False, "0", 1)
        self.drafters = [EndpointView(name, Role.DRAFTER, healthy=True, status=status) for name in drafters]

    def drafter(self, endpoint: str) -> ScriptedDrafter:
        return self.peers[endpoint]

    def next_change(self) -> asyncio.Event:
        return self.change

    def report(self, view: EndpointView, outcome: Outcome | BaseException, *, towards: str) -> None:
        outcome = outcome_of(outcome) if isinstance(outcome, BaseException) else outcome
        self.outcomes.append((view.endpoint, outcome))
        self.circuits.note(view.endpoint, towards, outcome, time.monotonic())

    def resting(self, *, towards: str) -> Mapping[str, float]:
        return self.circuits.resting(towards, time.monotonic())


class QuickHedge(Routing):
    """Hedges at once: what is tested is what happens then."""

    def hedge_delay_s(self, verifier: str) -> float:
        return 0.0


@contextlib.asynccontextmanager
async def kept(cluster: ScriptedCluster, routing: Routing | None = None) -> AsyncIterator[DrafterKeeper]:
    keeper = DrafterKeeper(
        cast("Cluster", cluster), routing or Routing(), FACTS, lambda: (1,), dict, itertools.count(1)
    )
    running = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def ended(attachment_id: int, reason: DetachReason = DetachReason.STREAM_BROKEN) -> AttachmentChange:
    return AttachmentChange(AttachmentId(attachment_id), AttachmentState.DETACHED, detach_reason=reason)


async def until_attached(keeper: DrafterKeeper, drafter: str) -> None:
    async with asyncio.timeout(5.0):
        while keeper.drafter != drafter:  # noqa: ASYNC110 - a keeper tells nobody else
            await asyncio.sleep(0)


async def test_a_drafter_that_answers_late_is_overtaken_cancelled_and_told_to_leave() -> None:
    late, quick = ScriptedDrafter(), ScriptedDrafter()
    late.answers.clear()
    cluster = ScriptedCluster(a=late, b=quick)
    async with kept(cluster, QuickHedge()) as keeper:
        await until_attached(keeper, "b")
        await late.until(late.left, 1)
        assert (late.asked, late.cancelled, late.left, late.joined) == ([1], [1], [1], [])
        assert (quick.joined, quick.left) == ([2], [])
        assert ("a", Outcome.FAILED) in cluster.outcomes
        late.answers.set()
        await asyncio.sleep(0)
        assert keeper.drafter == "b"


async def test_where_the_first_is_attached_after_all_the_second_is_told_to_leave_and_nothing_is_held_against_it() -> (
    None
):
    first, second = ScriptedDrafter(), ScriptedDrafter()
    first.answers.clear()
    second.answers.clear()
    cluster = ScriptedCluster(a=first, b=second)
    async with kept(cluster, QuickHedge()) as keeper:
        await second.until(second.asked, 1)
        first.answers.set()
        await until_attached(keeper, "a")
        await second.until(second.left, 1)
        assert (second.left, second.joined) == ([2], [])
        assert ("b", Outcome.FAILED) not in cluster.outcomes
        # The second came through at the verifier before it left: there it had replaced the first.
        keeper.note(ended(2, DetachReason.REQUESTED))
        assert keeper.drafter == "a"
        keeper.note(ended(1, DetachReason.REPLACED))
        await first.until(first.joined, 2)
        assert first.joined == [1, 3]


async def test_where_the_verifier_took_the_second_in_place_of_the_first_the_second_is_kept() -> None:
    first, second = ScriptedDrafter(), ScriptedDrafter()
    first.answers.clear()
    second.answers.clear()
    cluster = ScriptedCluster(a=first, b=second)
    async with kept(cluster, QuickHedge()) as keeper:
        await second.until(second.asked, 1)
        keeper.note(ended(1, DetachReason.REPLACED))
        first.answers.set()
        await first.until(first.joined, 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert keeper.drafter == ""
        second.answers.set()
        await until_attached(keeper, "b")
        assert (first.left, second.left) == ([], [])
        assert Outcome.FAILED not in {outcome for _, outcome in cluster.outcomes}


async def test_of_two_that_come_through_together_the_higher_number_is_kept_as_the_verifier_keeps_it() -> None:
    first, second = ScriptedDrafter(), ScriptedDrafter()
    first.answers = second.answers = asyncio.Event()
    async with kept(ScriptedCluster(a=first, b=second), QuickHedge()) as keeper:
        await second.until(second.asked, 1)
        first.answers.set()
        await until_attached(keeper, "b")
        await first.until(first.left, 1)
        assert (first.joined, first.left, second.left) == ([1], [1], [])


async def test_at_most_two_are_tried_at_a_time_and_one_alone_where_there_is_no_other() -> None:
    drafters = [ScriptedDrafter() for _ in range(3)]
    for drafter in drafters:
        drafter.answers.clear()
    async with kept(ScriptedCluster(a=drafters[0], b=drafters[1], c=drafters[2]), QuickHedge()):
        await drafters[1].until(drafters[1].asked, 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert [drafter.asked for drafter in drafters] == [[1], [2], []]
    alone = ScriptedDrafter()
    alone.answers.clear()
    async with kept(ScriptedCluster(a=alone), QuickHedge()) as keeper:
        await alone.until(alone.asked, 1)
        alone.answers.set()
        await until_attached(keeper, "a")
        assert alone.asked == [1]


async def test_a_session_that_ends_while_two_are_tried_leaves_no_call_behind() -> None:
    first, second = ScriptedDrafter(), ScriptedDrafter()
    first.answers.clear()
    second.answers.clear()
    async with kept(ScriptedCluster(a=first, b=second), QuickHedge()):
        await second.until(second.asked, 1)
    assert [task for task in asyncio.all_tasks() if "attach" in task.get_name() and not task.cancelling()] == []
    await asyncio.sleep(0)
    assert (first.cancelled, second.cancelled) == ([1], [2])


async def test_a_drafter_that_does_not_fit_the_session_is_not_asked_again_and_keeps_its_good_name() -> None:
    misfit, other = ScriptedDrafter(), ScriptedDrafter()
    misfit.refusal = AttachRefusedError("no", refusal="TOKENIZER_MISMATCH")
    cluster = ScriptedCluster(a=misfit, b=other)
    async with kept(cluster) as keeper:
        await until_attached(keeper, "b")
        keeper.note(ended(2, DetachReason.REPLACED))
        await other.until(other.joined, 2)
        assert (misfit.asked, other.joined) == ([1], [2, 3])
        assert cluster.resting(towards=VERIFIER) == {}


async def test_attachments_that_end_at_once_count_against_the_drafter_for_all_sessions() -> None:
    flapping = ScriptedDrafter()
    cluster = ScriptedCluster(a=flapping)
    async with kept(cluster) as keeper:
        for number in (1, 2, 3):
            await flapping.until(flapping.joined, number)
            await until_attached(keeper, "a")
            keeper.note(ended(number))
            await until_attached(keeper, "")
        assert "a" in cluster.resting(towards=VERIFIER)
        await flapping.until(flapping.joined, 4)  # half open: it is tried again, by one


@pytest.mark.parametrize("reason", [DetachReason.REPLACED, DetachReason.REQUESTED])
async def test_an_attachment_that_others_ended_does_not_count(reason: DetachReason) -> None:
    drafter = ScriptedDrafter()
    cluster = ScriptedCluster(a=drafter)
    async with kept(cluster) as keeper:
        for number in range(1, 6):
            await drafter.until(drafter.joined, number)
            await until_attached(keeper, "a")
            keeper.note(ended(number, reason))
    assert Outcome.FAILED not in {outcome for _, outcome in cluster.outcomes}


async def test_drafters_that_fail_are_tried_until_their_circuit_opens_and_then_the_keeper_waits_for_a_change() -> None:
    broken = ScriptedDrafter()
    broken.refusal = PeerUnavailableError("gone")
    cluster = ScriptedCluster(a=broken)
    async with kept(cluster) as keeper:
        await broken.until(broken.asked, 3)
        assert keeper.drafter == ""
        broken.refusal = None
        await until_attached(keeper, "a")
    assert broken.asked == [1, 2, 3, 4]
