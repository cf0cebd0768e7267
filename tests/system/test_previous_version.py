"""Peers of the previous version, over real gRPC: what either side says is cut down to what that version knows."""

from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from specdec.v1 import verifier_pb2 as pb
from specdec.v1.verifier_pb2_grpc import VerifierServiceServicer
from specdec.wire.channel import open_channel
from tests.system.hand_drafter import HandDrafter, HandSession
from tests.system.test_drafter_leaves import OUTPUT, PROMPT, SPEC, attach, open_session, running_drafter
from tests.system.toy_verifier import toy_verifier
from tests.unit.wire.previous_version import as_previous

SERVICE = "/specdec.v1.VerifierService/"


def said(message: Any) -> bytes:
    """As the previous version would have said it."""
    return as_previous(message.SerializeToString(), message.DESCRIPTOR.full_name)


def heard(message_class: Any) -> Callable[[bytes], Any]:
    """As much of it as the previous version understands."""
    return lambda data: message_class.FromString(as_previous(data, message_class.DESCRIPTOR.full_name))


class PreviousStub:
    """An orchestrator's and a drafter's calls to a verifier, as the previous version makes them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.OpenSession = channel.unary_stream(
            SERVICE + "OpenSession", request_serializer=said, response_deserializer=heard(pb.OpenSessionResponse)
        )
        self.Verify = channel.stream_stream(
            SERVICE + "Verify", request_serializer=said, response_deserializer=heard(pb.VerifyResponse)
        )


def add_as_previous(servicer: VerifierServiceServicer, server: grpc.aio.Server) -> None:
    """Serves a verifier in the words of the previous version."""
    handlers = {
        "OpenSession": grpc.unary_stream_rpc_method_handler(
            servicer.OpenSession, request_deserializer=heard(pb.OpenSessionRequest), response_serializer=said
        ),
        "Verify": grpc.stream_stream_rpc_method_handler(
            servicer.Verify, request_deserializer=heard(pb.VerifyRequest), response_serializer=said
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specdec.v1.VerifierService", handlers)])


@pytest.mark.parametrize("committed", [[], [*PROMPT, *OUTPUT[:5]]])
async def test_an_owner_and_a_drafter_of_the_previous_version_are_served(committed: list[int]) -> None:
    async with toy_verifier(forward_time_s=0.002) as verifier, open_channel(verifier.endpoint) as channel:
        stub: Any = PreviousStub(channel)
        session = HandSession(stub, SPEC, committed_token_ids=committed, prompt_length=len(PROMPT) if committed else 0)
        assert list((await session.open()).prompt_token_ids) == list(PROMPT)
        drafter = HandDrafter(stub)
        drafter.attach(session)
        told = list((await drafter.answer("attached")).committed_token_ids)
        drafter.draft(session, OUTPUT[len(told) - len(PROMPT) :][:4], len(told))
        assert await drafter.answer("verdict", "dropped")
        assert [*committed[len(PROMPT) :], *await session.read_to_end()] == OUTPUT
        drafter.end()


async def test_a_drafter_of_today_drafts_for_a_verifier_of_the_previous_version() -> None:
    async with toy_verifier(forward_time_s=0.002, add_to_server=add_as_previous) as verifier:
        session = await open_session(verifier)
        async with running_drafter() as drafter:
            await attach(drafter, session, verifier.endpoint)
            assert await session.read_to_end() == OUTPUT
        assert session.finished is not None
        assert session.finished.speculative.num_refused_drafts == 0
        assert session.changes[0].state == pb.ATTACHMENT_STATE_ATTACHED
