"""Every failure of a handler reaches the caller as one error of the tree, in each of the shapes of call in use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import WireSettings
from specdec.errors import (
    DeadlineError,
    InvalidParameterError,
    MalformedRequestError,
    MessageTooLargeError,
    NotOfferedError,
    OverloadedError,
    PeerUnavailableError,
    SpecdecError,
)
from specdec.v1 import verifier_pb2 as pb
from specdec.v1.verifier_pb2_grpc import (
    VerifierServiceServicer,
    VerifierServiceStub,
    add_VerifierServiceServicer_to_server,
)
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import Context, error_from_rpc
from specdec.wire.server import GrpcServer

SERVICE = pb.DESCRIPTOR.services_by_name["VerifierService"]
DEADLINE_S = 10.0

pytestmark = pytest.mark.system


class Scripted(VerifierServiceServicer):
    """Does what the test says, in each shape of call."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.on_open: Callable[[], AsyncIterator[pb.OpenSessionResponse]] | None = None

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def GetStatus(self, request: Any, context: Context) -> pb.VerifierServiceGetStatusResponse:
        self._fail()
        return pb.VerifierServiceGetStatusResponse()

    async def OpenSession(self, request: Any, context: Context) -> AsyncIterator[pb.OpenSessionResponse]:
        if self.on_open is not None:
            async with contextlib.aclosing(self.on_open()) as responses:
                async for response in responses:
                    yield response
        yield pb.OpenSessionResponse()
        self._fail()

    async def Verify(
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> AsyncIterator[pb.VerifyResponse]:
        async for request in request_iterator:
            yield pb.VerifyResponse(attachment_id=request.attachment_id)
            self._fail()


@contextlib.asynccontextmanager
async def serving(servicer: Scripted, wire: WireSettings | None = None) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1:0", wire=wire)
    server.add(add_VerifierServiceServicer_to_server, servicer, SERVICE)
    endpoint = await server.start()
    await server.set_serving()
    try:
        async with open_channel(endpoint) as channel:
            yield channel
    finally:
        await server.stop(grace_s=0)


async def call_unary(channel: grpc.aio.Channel) -> None:
    await VerifierServiceStub(channel).GetStatus(pb.VerifierServiceGetStatusRequest(), timeout=DEADLINE_S)


async def call_response_stream(channel: grpc.aio.Channel) -> None:
    async for _ in VerifierServiceStub(channel).OpenSession(pb.OpenSessionRequest(), timeout=DEADLINE_S):
        pass


async def call_both_streams(channel: grpc.aio.Channel) -> None:
    call = VerifierServiceStub(channel).Verify(timeout=DEADLINE_S)
    await call.write(pb.VerifyRequest(attachment_id=7))
    answer = await call.read()
    assert isinstance(answer, pb.VerifyResponse)
    assert answer.attachment_id == 7
    await call.read()


SHAPES = pytest.mark.parametrize("call", [call_unary, call_response_stream, call_both_streams])


async def told(call: Callable[[grpc.aio.Channel], Any], channel: grpc.aio.Channel) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel)
    return error_from_rpc(raised.value)


@SHAPES
async def test_an_error_of_the_tree_arrives_as_the_same_class_with_its_facts(call: Any) -> None:
    servicer = Scripted()
    servicer.failure = InvalidParameterError("temperature: must be finite", field="temperature")
    async with serving(servicer) as channel:
        error = await told(call, channel)
    assert type(error) is InvalidParameterError
    assert error.metadata == {"field": "temperature"}
    assert error.message == "temperature: must be finite"


@SHAPES
async def test_an_unknown_exception_arrives_as_internal_without_its_text(call: Any) -> None:
    servicer = Scripted()
    servicer.failure = ValueError("the caller must not read this")
    async with serving(servicer) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel)
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "must not read" not in repr(raised.value) + repr(raised.value.trailing_metadata())
    assert error_from_rpc(raised.value).reason == "INTERNAL"


@SHAPES
async def test_a_cancellation_that_is_not_the_calls_own_arrives_as_internal(call: Any) -> None:
    servicer = Scripted()
    servicer.failure = asyncio.CancelledError()
    async with serving(servicer) as channel:
        assert (await told(call, channel)).reason == "INTERNAL"


@SHAPES
async def test_a_time_out_inside_the_server_arrives_as_deadline_exceeded(call: Any) -> None:
    servicer = Scripted()
    servicer.failure = TimeoutError()
    async with serving(servicer) as channel:
        assert type(await told(call, channel)) is DeadlineError


@SHAPES
async def test_an_error_from_behind_the_server_is_passed_on(call: Any) -> None:
    servicer, behind = Scripted(), Scripted()
    behind.failure = OverloadedError("full", retry_after_s=1.5)
    async with serving(behind) as channel_behind:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call_unary(channel_behind)
    servicer.failure = raised.value
    async with serving(servicer) as channel:
        error = await told(call, channel)
    assert type(error) is OverloadedError
    assert error.retry_after_s == 1.5


@SHAPES
async def test_an_error_with_a_very_long_text_still_arrives(call: Any) -> None:
    servicer = Scripted()
    servicer.failure = MalformedRequestError("é" * 100_000, field="x" * 100_000)
    async with serving(servicer) as channel:
        assert type(await told(call, channel)) is MalformedRequestError


async def test_bytes_that_are_no_message_arrive_as_malformed_request() -> None:
    garbage = b"\xff\xff\xff\xff"
    async with serving(Scripted()) as channel:
        unary = channel.unary_unary("/specdec.v1.VerifierService/GetStatus")
        assert type(await told(lambda _: unary(garbage, timeout=DEADLINE_S), channel)) is MalformedRequestError

        async def streamed(_: grpc.aio.Channel) -> None:
            call = channel.stream_stream("/specdec.v1.VerifierService/Verify")(timeout=DEADLINE_S)
            await call.write(garbage)
            await call.read()

        assert type(await told(streamed, channel)) is MalformedRequestError


async def test_a_message_over_the_limit_arrives_as_message_too_large_in_each_shape_of_call() -> None:
    wire = WireSettings(max_message_bytes=2048)
    large = pb.VerifyRequest(session_id="x" * 4096)
    async with serving(Scripted(), wire) as channel:
        stub = VerifierServiceStub(channel)

        async def unary(_: grpc.aio.Channel) -> None:
            await channel.unary_unary("/specdec.v1.VerifierService/GetStatus")(b"\n" * 4096, timeout=DEADLINE_S)

        async def response_stream(_: grpc.aio.Channel) -> None:
            async for _response in stub.OpenSession(pb.OpenSessionRequest(session_id="x" * 4096), timeout=DEADLINE_S):
                pass

        async def both_streams(_: grpc.aio.Channel) -> None:
            call = stub.Verify(timeout=DEADLINE_S)
            await call.write(large)
            await call.read()

        for call in (unary, response_stream, both_streams):
            error = await told(call, channel)
            assert type(error) is MessageTooLargeError
            assert error.status == "RESOURCE_EXHAUSTED"


async def test_an_unknown_method_arrives_as_not_offered() -> None:
    async with serving(Scripted()) as channel:
        unknown = channel.unary_unary("/specdec.v1.VerifierService/NoSuchMethod")
        assert type(await told(lambda _: unknown(b"", timeout=DEADLINE_S), channel)) is NotOfferedError


async def test_a_deadline_of_the_caller_arrives_as_deadline_exceeded() -> None:
    servicer = Scripted()
    never = asyncio.Event()

    async def wait_for_ever() -> AsyncIterator[pb.OpenSessionResponse]:
        await never.wait()
        yield pb.OpenSessionResponse()

    servicer.on_open = wait_for_ever
    async with serving(servicer) as channel:

        async def call(_: grpc.aio.Channel) -> None:
            async for _response in VerifierServiceStub(channel).OpenSession(pb.OpenSessionRequest(), timeout=0.1):
                pass

        assert type(await told(call, channel)) is DeadlineError


async def test_a_peer_that_is_not_there_is_a_peer_unavailable() -> None:
    server = GrpcServer("127.0.0.1:0")
    endpoint = await server.start()
    await server.stop(grace_s=0)
    async with open_channel(endpoint) as channel:
        assert type(await told(call_unary, channel)) is PeerUnavailableError


@pytest.mark.parametrize("flood", [False, True], ids=["handler waits", "handler writes"])
async def test_a_handler_whose_caller_vanished_is_cancelled_at_once(flood: bool) -> None:
    servicer = Scripted()
    ended = asyncio.Event()

    async def stream() -> AsyncIterator[pb.OpenSessionResponse]:
        try:
            yield pb.OpenSessionResponse()
            while flood:
                yield pb.OpenSessionResponse()
            await asyncio.Event().wait()
        finally:
            ended.set()

    servicer.on_open = stream
    async with serving(servicer) as channel:
        call = VerifierServiceStub(channel).OpenSession(pb.OpenSessionRequest(), timeout=DEADLINE_S)
        await call.read()
        call.cancel()
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_health_is_not_serving_until_told_and_not_serving_again_while_stopping() -> None:
    server = GrpcServer("127.0.0.1:0")
    servicer = Scripted()
    release = asyncio.Event()

    async def hold() -> AsyncIterator[pb.OpenSessionResponse]:
        yield pb.OpenSessionResponse()
        await release.wait()

    servicer.on_open = hold
    server.add(add_VerifierServiceServicer_to_server, servicer, SERVICE)
    endpoint = await server.start()
    async with open_channel(endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def answer(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return (await health.Check(request, timeout=DEADLINE_S)).status

        serving_status, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert await answer("") == not_serving
        await server.set_serving()
        assert await answer("") == serving_status
        assert await answer(SERVICE.full_name) == serving_status

        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)
        assert (await watch.read()).status == serving_status
        held = VerifierServiceStub(channel).OpenSession(pb.OpenSessionRequest(), timeout=DEADLINE_S)
        await held.read()
        stopping = asyncio.create_task(server.stop(grace_s=DEADLINE_S))
        assert (await watch.read()).status == not_serving
        watch.cancel()
        release.set()
        assert isinstance(await held.read(), pb.OpenSessionResponse)  # a running call ends by itself within the grace
        assert await held.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, DEADLINE_S)


async def test_two_servers_never_share_a_port() -> None:
    first = GrpcServer("127.0.0.1:0")
    endpoint = await first.start()
    try:
        with pytest.raises(OSError, match="cannot listen"):
            await GrpcServer(endpoint).start()
    finally:
        await first.stop(grace_s=0)


def test_only_loopback_addresses_are_bound_without_insecure_bind() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "example.org:0"):
        with pytest.raises(ValueError, match="insecure_bind"):
            GrpcServer(listen)
