"""AdminService over real gRPC, and the orchestrator as a process."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.embedded_store import EmbeddedStore
from specdec import errors
from specdec.params import FinishReason, GenerationSpec, StopCriteria
from specdec.v1 import admin_pb2, generation_pb2
from specdec.wire.interceptors import error_from_rpc
from tests.system.fakes import FakeDrafter, FakeVerifier, expected_output, served_drafter, served_verifier, tokenise
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    Client,
    error_of,
    eventually,
    frames,
    orchestrator,
    read_until_tokens,
    routed,
)

pytestmark = pytest.mark.system

SPEC = GenerationSpec(prompt="hello", stop=StopCriteria(max_new_tokens=2000))
SLOW_S = 0.05


@contextlib.asynccontextmanager
async def small_cluster() -> AsyncIterator[tuple[Client, FakeVerifier, str, str]]:
    """A client, the verifier, and the endpoints of verifier and drafter."""
    verifier = FakeVerifier(round_s=SLOW_S)
    async with (
        EmbeddedStore() as redis,
        served_verifier(verifier) as target,
        served_drafter(FakeDrafter()) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        yield client, verifier, target, helper


async def test_the_cluster_is_told_with_the_orchestrator_first() -> None:
    async with small_cluster() as (client, _, target, helper):
        status = await client.cluster()
        assert [endpoint.endpoint for endpoint in status.endpoints] == [client.endpoint, target, helper]
        assert [endpoint.role for endpoint in status.endpoints] == [
            admin_pb2.ROLE_ORCHESTRATOR,
            admin_pb2.ROLE_VERIFIER,
            admin_pb2.ROLE_DRAFTER,
        ]
        assert all(endpoint.healthy for endpoint in status.endpoints)
        assert status.endpoints[1].status.model.name == "target"
        assert status.endpoints[2].status.proposer == "ngram"
        assert status.endpoints[1].round_trip_time.ToTimedelta().total_seconds() > 0
        assert status.store_healthy
        own = await client.generation.GetStatus(generation_pb2.GenerationServiceGetStatusRequest(), timeout=DEADLINE_S)
        assert own.status.serving
        assert [model.name for model in own.models] == ["target"]


async def test_a_watch_repeats_the_clusters_state() -> None:
    async with small_cluster() as (client, _, target, _helper):
        request = admin_pb2.WatchClusterStatusRequest()
        request.interval.FromMilliseconds(100)
        watch = client.admin.WatchClusterStatus(request, timeout=DEADLINE_S)
        num_seen = 0
        async for frame in watch:
            assert frame.status.endpoints[1].endpoint == target
            num_seen += 1
            if num_seen == 3:
                break
        watch.cancel()
        request.interval.FromMilliseconds(10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.admin.WatchClusterStatus(request, timeout=DEADLINE_S).read()
        assert isinstance(error_from_rpc(refused.value), errors.InvalidParameterError)


async def test_running_sessions_are_listed_page_by_page_without_their_prompts() -> None:
    async with small_cluster() as (client, _, target, helper):
        calls = [client.call(SPEC, f"s{number}") for number in range(5)]
        for call in calls:
            await read_until_tokens(call, 2)

        async def drafted() -> bool:
            listed = await client.admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S)
            return all(summary.drafter_endpoint == helper for summary in listed.sessions)

        await eventually(drafted)
        names: list[str] = []
        token = ""
        while True:
            request = admin_pb2.ListSessionsRequest(page_size=2, page_token=token)
            page = await client.admin.ListSessions(request, timeout=DEADLINE_S)
            names += [summary.session_id for summary in page.sessions]
            assert all(summary.verifier_endpoint == target and summary.epoch == 1 for summary in page.sessions)
            assert all(summary.num_prompt_tokens == 5 and summary.num_output_tokens > 0 for summary in page.sessions)
            token = page.next_page_token
            if not token:
                break
        assert names == [f"s{number}" for number in range(5)]
        for call in calls:
            call.cancel()


async def test_a_drained_verifier_gets_no_new_sessions_and_keeps_its_own() -> None:
    async with small_cluster() as (client, verifier, target, _helper):
        call = client.call(SPEC, "stays")
        answer = await read_until_tokens(call, 2)
        await client.admin.Drain(admin_pb2.DrainRequest(endpoint=target), timeout=DEADLINE_S)
        assert isinstance(await error_of(client.generate(SPEC)), errors.NoVerifierError)
        await read_until_tokens(call, len(answer.token_ids) + 10, answer)
        call.cancel()
        await client.admin.Undrain(admin_pb2.UndrainRequest(endpoint=target), timeout=DEADLINE_S)
        verifier.round_s = 0.0
        assert (await client.generate(SPEC)).token_ids == expected_output(tokenise("hello"), 2000)


async def test_a_drained_orchestrator_takes_no_new_sessions() -> None:
    async with small_cluster() as (client, _, _target, _helper):
        await client.admin.Drain(admin_pb2.DrainRequest(endpoint=client.endpoint), timeout=DEADLINE_S)
        assert isinstance(await error_of(client.generate(SPEC)), errors.DrainingError)


async def test_an_unknown_endpoint_cannot_be_drained() -> None:
    async with small_cluster() as (client, _, _target, _helper):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.admin.Drain(admin_pb2.DrainRequest(endpoint="127.0.0.1:1"), timeout=DEADLINE_S)
        assert isinstance(error_from_rpc(refused.value), errors.InvalidParameterError)


async def test_a_killed_session_ends_as_cancelled() -> None:
    async with small_cluster() as (client, verifier, _target, _helper):
        running = asyncio.create_task(client.generate(SPEC, "victim"))
        session = await verifier.session()
        killed = await client.admin.KillSession(admin_pb2.KillSessionRequest(session_id="victim"), timeout=DEADLINE_S)
        assert killed.found
        finished = (await running).finished
        assert finished is not None
        assert finished.reason is FinishReason.CANCELLED
        await asyncio.wait_for(session.closed.wait(), 2.0)
        again = await client.admin.KillSession(admin_pb2.KillSessionRequest(session_id="victim"), timeout=DEADLINE_S)
        assert not again.found


async def test_more_sessions_than_allowed_are_told_to_come_again() -> None:
    async with (
        EmbeddedStore() as redis,
        served_verifier(FakeVerifier(round_s=SLOW_S)) as target,
        orchestrator([target], redis=redis.url, max_sessions=1) as client,
    ):
        await routed(client)
        call = client.call(SPEC)
        await read_until_tokens(call, 2)
        told = await error_of(client.generate(SPEC))
        assert isinstance(told, errors.OverloadedError)
        assert told.retry_after_s is not None
        call.cancel()


async def test_the_process_serves_and_ends_in_order_on_sigterm() -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with served_verifier(verifier) as target:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrator", "--verifiers", target, "--drain-grace-s", "10"),
            *("--health-interval-s", "0.2"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(30):
                lines: list[dict[str, str]] = []
                while not lines or lines[-1]["event"] != "serving":
                    lines.append(json.loads(await process.stderr.readline()))
                listening = next(line for line in lines if line["event"] == "listening")
                client = Client(listening["endpoint"])
                await routed(client)
                check = client.channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                    response_deserializer=health_pb2.HealthCheckResponse.FromString,
                )
                health = await check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                call = client.call(dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=40)))
                answer = await read_until_tokens(call, 2)
                process.send_signal(signal.SIGTERM)
                await read_until_tokens(call, 40, answer)
                async for frame in frames(call):
                    answer.add(frame)
                assert answer.finished is not None
                assert answer.finished.reason is FinishReason.LENGTH
                assert await process.wait() == 0
                await client.channel.close()
        finally:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)


async def test_a_process_without_any_server_tells_that_it_has_no_verifier() -> None:
    async with EmbeddedStore() as redis, orchestrator([], redis=redis.url) as client:
        assert isinstance(await error_of(client.generate(SPEC)), errors.NoVerifierError)
