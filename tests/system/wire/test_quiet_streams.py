"""A stream on which nothing is said for long lives on, and one whose other end stands still or vanished is broken."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import WireSettings
from specdec.wire.channel import open_channel
from specdec.wire.server import GrpcServer
from tests.system.fakes import FakeVerifier, served_verifier

# Many pings within the test's time. A server that does not know its interval allows one in five minutes, and breaks the
# connection at the third that comes sooner.
BRISK = WireSettings(keepalive_time_s=0.3, keepalive_timeout_s=1.0, min_ping_interval_s=0.1)
QUIET_S = 4.0
DEADLINE_S = 30.0

SERVER = """
import asyncio, ctypes, sys
from specdec.wire.server import GrpcServer

async def serve():
    server = GrpcServer("127.0.0.1:0")
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ctypes.PyDLL(None).sleep(int(sys.argv[1]))  # a PyDLL keeps the interpreter's lock
    await server.set_serving()
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@contextlib.asynccontextmanager
async def quiet_stream(
    busy_s: int = 0,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, "grpc.aio.UnaryStreamCall[object, object]"]]:
    """A server in a process of its own, and a stream of it that is silent until it is told to go on."""
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, str(busy_s), stdin=pipe, stdout=pipe)
    try:
        assert server.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            endpoint = (await server.stdout.readline()).decode().strip()
        async with open_channel(endpoint) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            yield server, watch
    finally:
        server.kill()
        await server.wait()


async def test_a_quiet_stream_is_not_cut_off_for_its_pings():
    server = GrpcServer("127.0.0.1:0", wire=BRISK)
    endpoint = await server.start()
    try:
        async with open_channel(endpoint, BRISK) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30.0)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            silence = asyncio.create_task(watch.read())
            await asyncio.wait([silence], timeout=QUIET_S)
            await server.set_serving()
            assert (await silence).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0.0)


@pytest.mark.system
async def test_a_server_that_stands_still_is_lost_long_before_the_calls_deadline():
    async with quiet_stream() as (server, watch):
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.system
async def test_a_server_whose_interpreter_is_busy_for_longer_than_a_ping_may_take_is_not_lost():
    async with quiet_stream(busy_s=4) as (server, watch):
        assert server.stdin is not None
        server.stdin.write(b"go on\n")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


OWNER = """
import asyncio, sys
from orchestrator.peers import VerifierPeer
from specdec.config import WireSettings
from specdec.ids import Epoch, SessionId
from specdec.messages import OpenSession
from specdec.params import GenerationSpec

async def own():
    request = OpenSession(SessionId("s"), Epoch(1), b"n" * 16, GenerationSpec(prompt="hello"))
    async for _ in VerifierPeer(sys.argv[1], WireSettings()).open_session(request):
        pass

asyncio.run(own())
"""


@pytest.mark.system
async def test_a_verifier_frees_the_session_of_an_owner_that_stands_still():
    verifier = FakeVerifier(round_s=2 * DEADLINE_S)
    async with served_verifier(verifier) as endpoint:
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, endpoint)
        try:
            session = await verifier.session(timeout_s=DEADLINE_S)
            os.kill(owner.pid, signal.SIGSTOP)
            async with asyncio.timeout(DEADLINE_S):
                await session.closed.wait()
        finally:
            owner.kill()
            await owner.wait()
