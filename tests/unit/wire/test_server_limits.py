"""What a server takes of one connection and one message, over real connections."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from specdec.config import WireSettings, parse_endpoint
from specdec.errors import MessageTooLargeError
from specdec.messages.cluster import Role
from specdec.v1 import verifier_pb2, verifier_pb2_grpc
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import Context, error_from_rpc
from specdec.wire.server import GrpcServer
from tests.unit.wire.tls_files import DEADLINE_S, Verifier, serving

SERVICE = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serving(Role.VERIFIER, None, WireSettings(handshake_timeout_s=0.2)) as endpoint:
        reader, writer = await asyncio.open_connection(*parse_endpoint(endpoint))
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(1024):  # the server's own settings frame may come first
                pass
        writer.close()


async def test_calls_beyond_the_streams_of_a_connection_wait_at_the_caller() -> None:
    async with (
        serving(Role.VERIFIER, None, WireSettings(max_concurrent_streams=2)) as endpoint,
        open_channel(endpoint) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        held = [stub.Verify(), stub.Verify()]
        for call in held:
            await call.write(verifier_pb2.VerifyRequest(attachment_id=1))
            await call.read()
        waiting = asyncio.ensure_future(stub.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest()))
        with pytest.raises(TimeoutError):  # nothing tells that it waits, but that it has not been answered
            await asyncio.wait_for(asyncio.shield(waiting), 0.3)
        held[0].cancel()
        await asyncio.wait_for(waiting, DEADLINE_S)
        held[1].cancel()


async def test_metadata_beyond_the_limit_is_refused_and_below_it_taken() -> None:
    async with (
        serving(Role.VERIFIER, None, WireSettings(max_metadata_bytes=8192)) as endpoint,
        open_channel(endpoint) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        request = verifier_pb2.VerifierServiceGetStatusRequest()
        for _ in range(20):  # by default chance decides between the soft limit and the hard one
            await stub.GetStatus(request, metadata=grpc.aio.Metadata(("x-filler", "x" * 7000)), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetStatus(request, metadata=grpc.aio.Metadata(("x-filler", "x" * 8500)), timeout=DEADLINE_S)
            assert type(error_from_rpc(raised.value)) is MessageTooLargeError


class Talkative(Verifier):
    """Commits 1 to 9 tokens."""

    async def OpenSession(self, request: Any, context: Context) -> Any:
        for num_tokens in range(1, 10):
            commit = verifier_pb2.Commit(token_ids=range(100, 100 + num_tokens), text="word " * num_tokens)
            yield verifier_pb2.OpenSessionResponse(event=verifier_pb2.SessionEvent(commit=commit))


@pytest.mark.parametrize(("bucket", "lengths"), [(0, 9), (256, 1)])
async def test_a_server_told_to_pad_sends_rounds_of_any_size_in_equal_messages(bucket: int, lengths: int) -> None:
    server = GrpcServer("127.0.0.1:0", wire=WireSettings(pad_messages_to_bytes=bucket))
    server.add(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, Talkative(), SERVICE)
    endpoint = await server.start()
    async with open_channel(endpoint) as channel:
        received: list[bytes] = []
        raw = channel.unary_stream(
            "/specdec.v1.VerifierService/OpenSession", response_deserializer=lambda message: received.append(message)
        )
        async for _ in raw(b"", timeout=DEADLINE_S):
            pass
    await server.stop(0)
    assert len({len(message) for message in received}) == lengths
    tokens = [len(verifier_pb2.OpenSessionResponse.FromString(message).event.commit.token_ids) for message in received]
    assert tokens == list(range(1, 10))


async def test_reflection_can_be_left_out() -> None:
    server = GrpcServer("127.0.0.1:0", with_reflection=False)
    endpoint = await server.start()
    async with open_channel(endpoint) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)
