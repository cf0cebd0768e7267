"""A stream on which nothing is said for long lives on: its pings are neither too rare nor too many."""

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import WireSettings
from specdec.wire.channel import open_channel
from specdec.wire.server import GrpcServer

# Many pings within the test's time. A server that does not know its interval allows one in five minutes, and breaks the
# connection at the third that comes sooner.
BRISK = WireSettings(keepalive_time_s=0.3, keepalive_timeout_s=1.0, min_ping_interval_s=0.1)
QUIET_S = 4.0


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
