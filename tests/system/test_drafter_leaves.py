"""A drafter and a real verifier over the wire: the drafter is told to end, or the link between them is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from drafter_service.device import DeviceThread
from drafter_service.drafter import Drafter
from drafter_service.proposers.registry import create_proposer
from specdec.attach_key import attach_key
from specdec.config import DrafterSettings, WireSettings
from specdec.errors import DrainingError
from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import AttachSession
from specdec.params import AcceptanceRule, SamplingParams, SpeculationOptions
from specdec.telemetry import DrafterMetrics
from specdec.v1 import common_pb2
from specdec.v1 import verifier_pb2 as pb
from tests.system.hand_drafter import DEADLINE_S, HandSession
from tests.system.lost_links import proxy_before
from tests.system.toy_verifier import ToyVerifier, toy_verifier
from tests.unit.verifier_service.harness import greedy_token_ids

PROMPT = (5, 6, 7)
NUM_TOKENS = 120
OUTPUT = greedy_token_ids(PROMPT, NUM_TOKENS)
SPEC = common_pb2.GenerationSpec(
    tokens=common_pb2.TokenPrompt(token_ids=PROMPT),
    sampling=common_pb2.SamplingParameters(temperature=0.0),
    stop=common_pb2.StopCriteria(max_new_tokens=NUM_TOKENS),
)
WIRE = WireSettings(keepalive_time_s=0.2, keepalive_timeout_s=0.2, min_ping_interval_s=0.1)


@contextlib.asynccontextmanager
async def running_drafter() -> AsyncIterator[Drafter]:
    device = DeviceThread()
    proposer = create_proposer(DrafterSettings(proposer="ngram"))
    drafter = Drafter(proposer, device, DrafterMetrics(), max_sessions=8, max_draft_tokens=8, wire=WIRE)
    try:
        yield drafter
    finally:
        await drafter.close()
        await device.close()


@pytest_asyncio.fixture
async def verifier() -> AsyncIterator[ToyVerifier]:
    async with toy_verifier(forward_time_s=0.01, wire=WIRE) as verifier:
        yield verifier


async def open_session(verifier: ToyVerifier) -> HandSession:
    session = HandSession(verifier.stub, SPEC)
    await session.open()
    return session


async def attach(drafter: Drafter, session: HandSession, endpoint: str, attachment_id: int = 1) -> None:
    assert session.opened is not None
    await drafter.attach(
        AttachSession(
            session_id=SessionId(session.session_id),
            epoch=Epoch(session.epoch),
            verifier_endpoint=endpoint,
            attachment_id=AttachmentId(attachment_id),
            attach_key=attach_key(session.opened.attach_secret, AttachmentId(attachment_id)),
            sampling=SamplingParams(temperature=0.0),
            speculation=SpeculationOptions(),
            known_token_ids=PROMPT,
            prompt_length=len(PROMPT),
            acceptance_rule=AcceptanceRule.GREEDY,
        )
    )


async def until_detached(session: HandSession, num_times: int = 1) -> pb.AttachmentChange:
    """What the owner is told when its drafter is gone."""
    while True:
        gone = [change for change in session.changes if change.state == pb.ATTACHMENT_STATE_DETACHED]
        if len(gone) >= num_times:
            return gone[-1]
        await session.read()
        assert session.finished is None, "the output ended before the owner was told"


async def until_idle(drafter: Drafter) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if drafter.load.num_attachments == 0:
                return
            await asyncio.sleep(0.002)


async def test_a_drafter_that_ends_leaves_its_sessions_and_their_owners_are_told_at_once(verifier: ToyVerifier) -> None:
    async with running_drafter() as drafter:
        sessions = [await open_session(verifier) for _ in range(3)]
        for session in sessions:
            await attach(drafter, session, verifier.endpoint)
        await drafter.close()
        for session in sessions:
            assert (await until_detached(session)).detach_reason == pb.DETACH_REASON_REQUESTED
        with pytest.raises(DrainingError):
            await attach(drafter, sessions[0], verifier.endpoint, attachment_id=2)
        assert drafter.load.num_attachments == 0
    async with running_drafter() as another:
        await attach(another, sessions[0], verifier.endpoint, attachment_id=2)
        outputs = [await session.read_to_end() for session in sessions]
    assert outputs == [OUTPUT] * 3


async def test_a_drafter_that_ends_while_it_joins_leaves_nothing_at_the_verifier(verifier: ToyVerifier) -> None:
    async with running_drafter() as drafter:
        session = await open_session(verifier)
        joining = asyncio.create_task(attach(drafter, session, verifier.endpoint))
        await asyncio.sleep(0)  # it waits for a stream by now
        await drafter.close()
        with pytest.raises(DrainingError):
            await joining
        assert drafter.load.num_attachments == 0
    assert await session.read_to_end() == OUTPUT
    assert verifier.engine.load().num_attachments == 0


async def test_a_drafter_that_ends_while_its_proposer_is_made_ready_leaves_that_session_too(
    verifier: ToyVerifier,
) -> None:
    async with running_drafter() as drafter:
        session = await open_session(verifier)
        blocked = asyncio.Event()
        never = asyncio.get_running_loop().create_future()

        async def not_ready(*_: object) -> object:
            blocked.set()
            return await never

        drafter._new_session = not_ready
        joining = asyncio.create_task(attach(drafter, session, verifier.endpoint))
        await blocked.wait()
        await drafter.close()
        assert (await until_detached(session)).detach_reason == pb.DETACH_REASON_REQUESTED
        joining.cancel()
    assert await session.read_to_end() == OUTPUT


async def test_a_verifier_behind_a_dead_link_loses_its_drafters_on_both_sides_and_they_may_come_again(
    verifier: ToyVerifier,
) -> None:
    async with proxy_before(verifier.endpoint) as proxy, running_drafter() as drafter:
        session = await open_session(verifier)
        await attach(drafter, session, proxy.endpoint)
        proxy.vanish()
        await until_idle(drafter)
        assert (await until_detached(session)).detach_reason == pb.DETACH_REASON_STREAM_BROKEN
        await attach(drafter, session, proxy.endpoint, attachment_id=2)
        assert await session.read_to_end() == OUTPUT
        await until_idle(drafter)


async def test_a_drafter_forgets_verifiers_that_are_gone() -> None:
    async with running_drafter() as drafter:
        for _ in range(3):
            async with toy_verifier(wire=WIRE) as passing:
                session = await open_session(passing)
                await attach(drafter, session, passing.endpoint)
                await session.read_to_end()
                await until_idle(drafter)
            link = drafter._verifiers[passing.endpoint]
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    if not link.is_alive:
                        break
                    await asyncio.sleep(0.002)
        assert len(drafter._verifiers) == 1
