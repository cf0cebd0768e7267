"""Drafters that answer late or fail, over real gRPC: another is tried, and all sessions learn from one."""

import asyncio

import structlog

from orchestrator.breaker import NUM_FAILURES_TO_OPEN
from orchestrator.embedded_store import EmbeddedStore
from specdec import errors
from specdec.ids import AttachmentId
from specdec.messages import AttachmentChange, AttachmentState, DetachReason
from specdec.v1 import admin_pb2
from tests.system.fakes import FakeDrafter, FakeVerifier, served_drafter, served_verifier
from tests.system.orchestrator_harness import SLOW_S, long_spec, orchestrator, read_until_tokens, routed


async def test_a_drafter_that_does_not_answer_is_overtaken_by_another_and_told_to_leave(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s = SLOW_S
    late, quick = FakeDrafter(), FakeDrafter()
    late.answers.clear()
    quick.answers.clear()
    async with (
        served_verifier(verifier) as target,
        served_drafter(late) as one,
        served_drafter(quick) as other,
        orchestrator([target], [one, other], redis=redis.url) as client,
    ):
        await routed(client, 4)
        call = client.call(long_spec(), "hedged")
        await asyncio.gather(late.attachment(), quick.attachment())
        if late.attached[0].attachment_id == 2:  # whoever was asked first is the late one
            late, quick = quick, late
        quick.answers.set()
        async with asyncio.timeout(5.0):
            assert await late.told_to_leave.get() == "hedged"
        session = await verifier.session()
        given_up = AttachmentChange(AttachmentId(1), AttachmentState.DETACHED, detach_reason=DetachReason.REQUESTED)
        session.injected.put_nowait(given_up)
        await read_until_tokens(call, 20)
        assert (len(late.attached), len(quick.attached)) == (1, 1), "what was given up is nobody's concern"
        call.cancel()


async def test_a_drafter_that_fails_is_left_alone_by_all_sessions_and_the_operator_sees_why(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s, broken = SLOW_S, FakeDrafter()
    broken.refusal = errors.PeerUnavailableError("it cannot reach the verifier")
    async with (
        served_verifier(verifier) as target,
        served_drafter(broken) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        calls = [client.call(long_spec(), f"s{number}") for number in range(16)]
        for call in calls:
            await read_until_tokens(call, 40)  # a second and more: each for itself would ask three times and more
        # All may have asked before the first was refused; then one at a time, less and less often.
        assert NUM_FAILURES_TO_OPEN <= len(broken.attached) < 2 * len(calls)
        (told,) = [one for one in (await client.cluster()).endpoints if one.endpoint == helper]
        assert told.circuit in (admin_pb2.CIRCUIT_STATE_OPEN, admin_pb2.CIRCUIT_STATE_HALF_OPEN)
        assert told.last_error == "PEER_UNAVAILABLE"
        broken.refusal = None
        num_asked = len(broken.attached)
        await broken.attachment(num_asked + len(calls) - 1, timeout_s=10.0)
        for call in calls:
            call.cancel()


async def test_what_a_drafter_says_of_its_refusal_is_in_no_log_and_keeps_no_other_from_the_session(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s = SLOW_S
    hostile = [FakeDrafter(), FakeDrafter()]
    for drafter in hostile:  # names that a line of our own log has, too
        drafter.refusal = errors.AttachRefusedError(
            "secret prompt", session_id="secret", event="secret", drafter="secret", refusal="secret", other="secret"
        )
    async with (
        served_verifier(verifier) as target,
        served_drafter(hostile[0]) as one,
        served_drafter(hostile[1]) as other,
        orchestrator([target], [one, other], redis=redis.url) as client,
    ):
        await routed(client, 4)
        with structlog.testing.capture_logs() as lines:
            call = client.call(long_spec(), "told")
            for drafter in hostile:
                await drafter.attachment(timeout_s=10.0)
            call.cancel()
        assert "drafter_not_attached" in {line["event"] for line in lines}
        assert "secret" not in str(lines)
