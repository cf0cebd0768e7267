"""AdminService over real gRPC, and the orchestrator as a process."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.embedded_store import EmbeddedStore
from specdec import errors
from specdec.messages import AttachmentChange, AttachmentState, DetachReason
from specdec.params import FinishReason, GenerationSpec, StopCriteria
from specdec.v1 import admin_pb2, generation_pb2
from specdec.wire.interceptors import error_from_rpc
from tests.system.fakes import FakeDrafter, FakeVerifier, expected_output, served_drafter, served_verifier, tokenise
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    Answer,
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


@dataclasses.dataclass(frozen=True)
class TwoOfEach:
    """By endpoint."""

    client: Client
    verifiers: dict[str, FakeVerifier]
    drafters: dict[str, FakeDrafter]

    def finish_fast(self) -> None:
        for verifier in self.verifiers.values():
            verifier.round_s = 0.0


@contextlib.asynccontextmanager
async def two_of_each() -> AsyncIterator[TwoOfEach]:
    verifiers = [FakeVerifier(round_s=SLOW_S) for _ in range(2)]
    drafters = [FakeDrafter() for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(EmbeddedStore())
        targets = [await stack.enter_async_context(served_verifier(one)) for one in verifiers]
        helpers = [await stack.enter_async_context(served_drafter(one)) for one in drafters]
        client = await stack.enter_async_context(orchestrator(targets, helpers, redis=redis.url))
        await routed(client, 5)
        yield TwoOfEach(client, dict(zip(targets, verifiers, strict=True)), dict(zip(helpers, drafters, strict=True)))


async def _summaries(client: Client) -> list[admin_pb2.SessionSummary]:
    listed = await client.admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S)
    return list(listed.sessions)


async def _rest(call: Any, answer: Answer) -> None:
    async for frame in frames(call):
        answer.add(frame)


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


async def test_a_session_is_told_with_whom_it_is_for_and_how_it_does() -> None:
    async with small_cluster() as (client, _, target, helper):
        call = client.call(SPEC, "watched", tenant="team-a")
        await read_until_tokens(call, 6)

        async def drafted() -> bool:
            return (await _summaries(client))[0].drafter_endpoint == helper

        await eventually(drafted)
        (summary,) = await _summaries(client)
        assert (summary.tenant, summary.state) == ("team-a", admin_pb2.SESSION_STATE_STREAMING)
        assert (summary.num_failovers, summary.epoch) == (0, 1)
        assert summary.acceptance_rate == 0.5  # one of the fake verifier's two draft tokens a round
        assert summary.tokens_per_second > 0
        assert summary.age.ToTimedelta().total_seconds() > 0
        status = await client.cluster()
        own, verifier, drafter = status.endpoints
        assert [one.num_own_sessions for one in (own, verifier, drafter)] == [1, 1, 1]
        assert verifier.endpoint == target
        assert verifier.acceptance_rate == 0.5
        assert verifier.tokens_per_second > 0
        assert verifier.circuit == admin_pb2.CIRCUIT_STATE_CLOSED
        call.cancel()


async def test_a_drained_verifiers_sessions_go_on_elsewhere_without_a_lost_or_changed_token() -> None:
    async with two_of_each() as two:
        call = two.client.call(SPEC, "moves")
        answer = await read_until_tokens(call, 4)
        (summary,) = await _summaries(two.client)
        leaving = summary.verifier_endpoint
        ordered = await two.client.admin.Drain(admin_pb2.DrainRequest(endpoint=leaving), timeout=DEADLINE_S)
        assert ordered.num_sessions == 1

        async def moved() -> bool:
            (now,) = await _summaries(two.client)
            return now.verifier_endpoint not in ("", leaving)

        reading = asyncio.create_task(_rest(call, answer))
        await eventually(moved)
        (summary,) = await _summaries(two.client)
        assert (summary.num_failovers, summary.epoch) == (1, 2)
        assert isinstance(await error_of(two.client.generate(SPEC, "moves")), errors.SessionExistsError)
        two.finish_fast()
        await reading
        assert answer.token_ids == expected_output(tokenise("hello"), 2000)
        other = await two.client.generate(dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=4)))
        assert len(other.token_ids) == 4
        assert len(two.verifiers[leaving].sessions) == 1  # nothing new went there


async def test_where_no_other_verifier_would_take_them_a_drained_ones_sessions_run_to_their_end() -> None:
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


async def test_a_session_stays_where_a_drain_was_taken_back() -> None:
    async with two_of_each() as two:
        call = two.client.call(SPEC, "stays")
        answer = await read_until_tokens(call, 2)
        (summary,) = await _summaries(two.client)
        home = summary.verifier_endpoint
        (other,) = two.verifiers.keys() - {home}
        for endpoint in (other, home):  # in this order there is nowhere to go
            await two.client.admin.Drain(admin_pb2.DrainRequest(endpoint=endpoint), timeout=DEADLINE_S)
        await read_until_tokens(call, len(answer.token_ids) + 4, answer)
        for endpoint in (home, other):
            await two.client.admin.Undrain(admin_pb2.UndrainRequest(endpoint=endpoint), timeout=DEADLINE_S)
        await read_until_tokens(call, len(answer.token_ids) + 10, answer)
        (summary,) = await _summaries(two.client)
        assert (summary.verifier_endpoint, summary.num_failovers) == (home, 0)
        call.cancel()


async def test_a_drained_drafter_is_told_to_leave_and_another_takes_its_place() -> None:
    async with two_of_each() as two:
        call = two.client.call(SPEC, "drafted")
        await read_until_tokens(call, 2)

        async def drafter() -> str:
            return (await _summaries(two.client))[0].drafter_endpoint

        leaving = str(await eventually(drafter))
        await two.client.admin.Drain(admin_pb2.DrainRequest(endpoint=leaving), timeout=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert await two.drafters[leaving].told_to_leave.get() == "drafted"
        attachment = two.drafters[leaving].attached[0].attachment_id
        requested = AttachmentChange(attachment, AttachmentState.DETACHED, detach_reason=DetachReason.REQUESTED)
        for verifier in two.verifiers.values():
            for session in verifier.sessions:
                session.injected.put_nowait(requested)

        async def is_another() -> bool:
            return await drafter() not in ("", leaving)

        await eventually(is_another)
        call.cancel()


async def test_a_drain_is_seen_by_every_orchestrator_of_the_store_and_outlasts_a_restart() -> None:
    async with (
        EmbeddedStore() as redis,
        served_verifier(FakeVerifier()) as target,
        orchestrator([target], redis=redis.url) as second,
    ):
        async with orchestrator([target], redis=redis.url) as first:
            await routed(first)
            ordered = await first.admin.Drain(admin_pb2.DrainRequest(endpoint=target), timeout=DEADLINE_S)
            assert ordered.shared
            assert (await first.cluster()).drains_shared
        async with orchestrator([target], redis=redis.url) as restarted:
            assert (await restarted.cluster()).endpoints[1].drained

            async def told() -> bool:
                return (await second.cluster()).endpoints[1].drained

            await eventually(told)
            assert isinstance(await error_of(second.generate(SPEC)), errors.NoVerifierError)
            await restarted.admin.Undrain(admin_pb2.UndrainRequest(endpoint=target), timeout=DEADLINE_S)

            async def forgotten() -> bool:
                return not (await second.cluster()).endpoints[1].drained

            await eventually(forgotten)


async def test_a_drain_beside_a_store_of_ones_own_or_without_one_holds_here_and_says_so() -> None:
    async with served_verifier(FakeVerifier()) as target:
        async with orchestrator([target]) as client:  # an embedded store
            await routed(client)
            ordered = await client.admin.Drain(admin_pb2.DrainRequest(endpoint=target), timeout=DEADLINE_S)
            assert not ordered.shared
            assert not (await client.cluster()).drains_shared
            assert (await client.cluster()).endpoints[1].drained
        async with EmbeddedStore() as redis, orchestrator([target], redis=redis.url) as client:
            await routed(client)
            await redis.stop()
            ordered = await client.admin.Drain(admin_pb2.DrainRequest(endpoint=target), timeout=DEADLINE_S)
            assert not ordered.shared
            assert (await client.cluster()).endpoints[1].drained


async def test_a_drained_orchestrator_takes_no_new_sessions() -> None:
    async with small_cluster() as (client, _, _target, _helper):
        await client.admin.Drain(admin_pb2.DrainRequest(endpoint=client.endpoint), timeout=DEADLINE_S)
        assert isinstance(await error_of(client.generate(SPEC)), errors.DrainingError)
        assert isinstance(await error_of(client.resume("any", [])), errors.DrainingError)
        assert (await client.cluster()).endpoints[0].drained
        await client.admin.Undrain(admin_pb2.UndrainRequest(endpoint=client.endpoint), timeout=DEADLINE_S)
        few = dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=4))
        assert len((await client.generate(few)).token_ids) == 4


async def test_what_makes_no_sense_is_refused_by_the_name_of_the_field() -> None:
    async with small_cluster() as (client, _, _target, _helper):
        admin = client.admin
        for method, request, field in [
            (admin.Drain, admin_pb2.DrainRequest(endpoint="127.0.0.1:1"), "endpoint"),
            (admin.Drain, admin_pb2.DrainRequest(endpoint=""), "endpoint"),
            (admin.Undrain, admin_pb2.UndrainRequest(endpoint="nonsense"), "endpoint"),
            (admin.ListSessions, admin_pb2.ListSessionsRequest(page_size=-1), "page_size"),
            (admin.ListSessions, admin_pb2.ListSessionsRequest(page_size=1001), "page_size"),
            (admin.ListSessions, admin_pb2.ListSessionsRequest(page_token="no such token"), "page_token"),
            (admin.KillSession, admin_pb2.KillSessionRequest(session_id=""), "session_id"),
            (admin.KillSession, admin_pb2.KillSessionRequest(session_id="a b"), "session_id"),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(request, timeout=DEADLINE_S)
            told = error_from_rpc(refused.value)
            assert isinstance(told, errors.InvalidParameterError)
            assert told.metadata["field"] == field


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
