"""Who asks for too much is told when to come again, before anything is claimed or lost."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from orchestrator import sessions
from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore, StoreSettings
from specdec import errors
from specdec.ids import SessionId
from specdec.messages import Load
from specdec.v1 import generation_pb2
from specdec.wire.convert import generation_spec_to_pb
from specdec.wire.tenant import tenant_to_metadata
from tests.system.fakes import FakeVerifier, expected_output, served_verifier, text_of, tokenise
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    OUTPUT,
    PROMPT,
    SLOW_S,
    SPEC,
    Answer,
    Client,
    drained,
    error_of,
    eventually,
    frames,
    long_spec,
    nothing_running,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system

FULL = Load(4, 16, max_waiting_sessions=16, queue_wait_s=8.0)


@dataclasses.dataclass(frozen=True)
class Served:
    client: Client
    verifier: FakeVerifier
    store: SessionStore

    async def queue_is(self, load: Load) -> None:
        """Once the orchestrator has looked."""
        self.verifier.load = load

        async def seen() -> bool:
            (verifier,) = (await self.client.cluster()).endpoints[1:]
            return verifier.status.load.num_waiting_sessions == load.num_waiting_sessions

        await eventually(seen)


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """An orchestrator with these settings, the verifier behind it and the store beside it."""
    verifier = FakeVerifier()
    async with (
        EmbeddedStore() as redis,
        SessionStore(StoreSettings(redis.url)) as store,
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, **settings) as client,
    ):
        await routed(client)
        yield Served(client, verifier, store)


async def refusal(answer: Any) -> errors.SpecdecError:
    """What it is refused with, which tells when to come again."""
    told = await error_of(answer)
    assert told.retry_after_s is not None
    assert told.retry_after_s > 0
    return told


async def read_on(call: Any, answer: Answer) -> None:
    async for frame in frames(call):
        answer.add(frame)


# --- Shares of tenants ------------------------------------------------------------------------------------------------


async def test_a_tenant_over_its_requests_is_let_in_again_when_it_was_told() -> None:
    async with served(tenant_requests_per_s=2.0, tenant_request_burst=1) as one:
        await one.client.generate(SPEC, "first", tenant="busy")
        told = await refusal(one.client.generate(SPEC, "second", tenant="busy"))
        assert isinstance(told, errors.RateLimitedError)
        assert (await one.client.generate(SPEC, tenant="quiet")).token_ids == OUTPUT
        assert told.retry_after_s is not None
        await asyncio.sleep(told.retry_after_s)
        assert (await one.client.generate(SPEC, "second", tenant="busy")).token_ids == OUTPUT


async def test_what_is_refused_is_neither_claimed_nor_opened() -> None:
    async with served(tenant_requests_per_s=0.1) as one:
        await one.client.generate(SPEC, "first")
        await refusal(one.client.generate(SPEC, "second"))
        assert await one.store.read(SessionId("second")) is None
        assert len(one.verifier.sessions) == 1


async def test_tokens_of_prompt_and_output_are_charged_and_a_debt_is_waited_for() -> None:
    async with served(tenant_tokens_per_s=0.1, tenant_token_burst=10) as one:
        await one.client.generate(SPEC)  # 5 tokens of prompt, 24 of output
        told = await refusal(one.client.generate(SPEC))
        assert isinstance(told, errors.RateLimitedError)
        assert told.metadata["limit"] == "tokens"
        assert told.retry_after_s is not None
        # 29 of 10 are spent, and one has to be there: 20 tokens, less what came in since, however slow the machine is.
        assert 100.0 < told.retry_after_s <= 200.0


async def test_a_tenant_has_so_many_streams_and_room_again_when_one_ends() -> None:
    async with served(tenant_max_streams=2) as one:
        one.verifier.round_s = SLOW_S
        calls = [one.client.call(long_spec(), tenant="wide") for _ in range(2)]
        for call in calls:
            await read_until_tokens(call, 2)
        assert isinstance(await refusal(one.client.generate(SPEC, tenant="wide")), errors.TooManyStreamsError)
        both = dataclasses.replace(SPEC, num_samples=2)
        assert isinstance(await refusal(drained(one.client.call(both, tenant="wide"))), errors.TooManyStreamsError)
        calls[0].cancel()

        async def one_is_left() -> bool:
            return len(await one.client.session_ids()) == 1

        await eventually(one_is_left)
        assert (await one.client.generate(SPEC, tenant="wide")).token_ids == OUTPUT
        calls[1].cancel()


async def test_the_next_request_of_a_tenant_with_one_stream_is_let_in_when_the_last_one_has_ended() -> None:
    async with served(tenant_max_streams=1) as one:
        for _ in range(20):
            assert (await one.client.generate(SPEC, tenant="narrow")).token_ids == OUTPUT


async def test_a_refused_resume_ends_nothing_that_runs() -> None:
    async with served(tenant_tokens_per_s=0.01, tenant_token_burst=1) as one:
        one.verifier.round_s = SLOW_S
        call = one.client.call(SPEC, "runs")
        answer = await read_until_tokens(call, 2)
        assert isinstance(await refusal(one.client.resume("runs", answer.token_ids)), errors.RateLimitedError)
        assert (await read_until_tokens(call, 24, answer)).token_ids == OUTPUT


async def test_a_resume_with_foreign_tokens_ends_nothing_that_runs() -> None:
    async with served() as one:
        one.verifier.round_s = SLOW_S
        call = one.client.call(SPEC, "runs")
        answer = await read_until_tokens(call, 4)
        assert isinstance(await error_of(one.client.resume("runs", [7])), errors.ResumeMismatchError)
        assert (await read_until_tokens(call, 24, answer)).token_ids == OUTPUT


async def test_limits_of_a_file_hold_from_the_next_request_on_after_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[tenants.closed]\nrequests_per_s = 0.001")
    async with served(tenant_limits=path) as one:
        await one.client.generate(SPEC, tenant="closed")
        assert isinstance(await refusal(one.client.generate(SPEC, tenant="closed")), errors.RateLimitedError)
        await one.client.generate(SPEC, tenant="other")
        await one.client.generate(SPEC, tenant="other")
        path.write_text('[tenants.closed]\nrequests_per_s = "unlimited"')
        assert (await one.client.generate(SPEC, tenant="closed")).token_ids == OUTPUT


# --- Shedding ---------------------------------------------------------------------------------------------------------


async def test_where_every_queue_is_full_a_new_request_is_refused_and_one_that_ran_goes_on() -> None:
    async with served() as one:
        one.verifier.round_s = SLOW_S
        call = one.client.call(SPEC, "ran")
        answer = await read_until_tokens(call, 4)
        call.cancel()
        await nothing_running(one.client)
        one.verifier.round_s = 0.0
        nearly_full = dataclasses.replace(FULL, num_waiting_sessions=15)
        await one.queue_is(nearly_full)
        assert isinstance(await refusal(one.client.generate(SPEC, "new")), errors.OverloadedError)
        assert await one.store.read(SessionId("new")) is None
        assert (await one.client.resume("ran", answer.token_ids)).token_ids == OUTPUT


async def test_a_resume_that_is_shed_can_be_tried_again() -> None:
    async with served() as one:
        await one.client.generate(SPEC, "ran")
        await one.queue_is(FULL)
        assert isinstance(await refusal(one.client.resume("ran", OUTPUT[:3])), errors.OverloadedError)
        await one.queue_is(Load())
        assert (await one.client.resume("ran", OUTPUT[:3])).token_ids == OUTPUT


async def test_who_cannot_be_served_in_time_is_told_at_once_and_who_can_is_served() -> None:
    async with served() as one:
        await one.queue_is(Load(4, 5, max_waiting_sessions=16, queue_wait_s=10.0))
        request = generation_pb2.GenerateRequest(spec=generation_spec_to_pb(SPEC), session_id="hurried")
        told = await refusal(drained(one.client.generation.Generate(request, timeout=5.0)))
        assert isinstance(told, errors.OverloadedError)
        assert told.retry_after_s is not None
        assert told.retry_after_s > 4.5
        assert one.verifier.sessions == []
        assert (await one.client.generate(SPEC)).token_ids == OUTPUT  # its deadline is further away


async def test_the_orchestrator_keeps_places_for_sessions_that_go_on() -> None:
    async with served(max_sessions=1, resume_reserve=1) as one:
        await one.client.generate(SPEC, "ran")
        await nothing_running(one.client)
        one.verifier.round_s = SLOW_S
        call = one.client.call(long_spec())
        await read_until_tokens(call, 2)
        assert isinstance(await refusal(one.client.generate(SPEC)), errors.OverloadedError)
        assert (await one.client.resume("ran", OUTPUT[:20])).token_ids == OUTPUT
        call.cancel()


async def test_a_session_that_a_verifier_turns_away_after_it_opened_it_can_be_resumed() -> None:
    async with served() as one:
        one.verifier.round_s = 5.0
        call = one.client.call(SPEC, "turned-away")
        session = await one.verifier.session()
        session.injected.put_nowait(errors.OverloadedError("too many sessions wait", retry_after_s=2.5))
        told = await refusal(drained(call))
        assert isinstance(told, errors.OverloadedError)
        assert told.retry_after_s == 2.5
        await record_in(one.store, "turned-away", RecordState.OPEN)
        one.verifier.round_s = 0.0
        assert (await one.client.resume("turned-away", [])).token_ids == OUTPUT


# --- Slow readers -----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_resumes_without_a_lost_or_repeated_token() -> None:
    num_tokens = 3000
    expected = expected_output(tokenise(PROMPT), num_tokens)
    async with served() as one:
        one.verifier.padding = "x" * 50_000
        call = one.client.call(long_spec(num_tokens), "slow")
        answer = await read_until_tokens(call, 2)
        await nothing_running(one.client)  # nobody reads, so the orchestrator gave up
        assert isinstance(await error_of(read_on(call, answer)), errors.SlowReaderError)
        assert len(answer.token_ids) < num_tokens
        one.verifier.padding = ""
        resumed = await one.client.resume("slow", answer.token_ids)
        assert resumed.token_ids == expected
        assert answer.text.replace("x" * 50_000, "") + resumed.text == text_of(expected)


async def test_who_reads_nothing_at_all_is_cut_off_told_why_and_holds_no_place() -> None:
    async with served(max_sessions=1, resume_reserve=0, slow_reader_timeout_s=0.3) as one:
        one.verifier.padding = "x" * 50_000
        call = one.client.call(long_spec(3000), "stalled")
        answer = await read_until_tokens(call, 2)
        await nothing_running(one.client)
        one.verifier.padding = ""

        async def has_room() -> bool:
            with contextlib.suppress(errors.OverloadedError):
                return (await one.client.generate(SPEC)).token_ids == OUTPUT
            return False

        await eventually(has_room)

        async def handler_is_gone() -> bool:
            return not any(task.get_name().endswith("GenerationService/Generate]") for task in asyncio.all_tasks())

        await eventually(handler_is_gone)
        assert isinstance(await error_of(read_on(call, answer)), errors.SlowReaderError)
        await nothing_running(one.client)
        resumed = await one.client.resume("stalled", answer.token_ids)
        assert resumed.token_ids == expected_output(tokenise(PROMPT), 3000)


# --- Guessing and floods ----------------------------------------------------------------------------------------------


async def answers_about(client: Client, session_id: str, tenant: str) -> list[object]:
    """All that somebody learns of a session by asking for it."""
    metadata = tenant_to_metadata(tenant)
    learned: list[object] = []
    resume = generation_pb2.ResumeRequest(session_id=session_id)
    try:
        await client.generation.Resume(resume, timeout=DEADLINE_S, metadata=metadata).read()
    except grpc.aio.AioRpcError as error:
        trailers = sorted((key, value) for key, value in error.trailing_metadata())
        learned += [error.code(), error.details(), trailers]
    try:
        cancel = generation_pb2.CancelRequest(session_id=session_id)
        learned.append(await client.generation.Cancel(cancel, timeout=DEADLINE_S, metadata=metadata))
    except grpc.aio.AioRpcError as error:
        learned += [error.code(), error.details()]
    return learned


async def test_another_tenants_sessions_answer_exactly_as_unknown_ones() -> None:
    async with served() as one:
        await one.client.generate(SPEC, "over", tenant="owner")
        one.verifier.round_s = SLOW_S
        call = one.client.call(long_spec(200), "runs", tenant="owner")
        answer = await read_until_tokens(call, 2)
        unknown = await answers_about(one.client, "never-was", "thief")
        assert len(unknown) == 4
        assert await answers_about(one.client, "over", "thief") == unknown
        assert await answers_about(one.client, "runs", "thief") == unknown
        await read_until_tokens(call, 200, answer)  # and it runs on


async def test_another_tenants_session_answers_as_an_unknown_one_while_the_store_is_away() -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with (
        served_verifier(verifier) as target,
        EmbeddedStore() as redis,
        orchestrator([target], redis=redis.url) as client,
    ):
        await routed(client)
        call = client.call(long_spec(), "runs", tenant="owner")
        await read_until_tokens(call, 2)
        await redis.stop()
        unknown = await answers_about(client, "never-was", "thief")
        assert await answers_about(client, "runs", "thief") == unknown
        call.cancel()


async def test_a_flood_of_resumes_of_one_session_leaves_one_stream_and_every_other_is_told_why() -> None:
    async with served(max_sessions=4, resume_reserve=4) as one:
        await one.client.generate(SPEC, "wanted")
        results = await asyncio.gather(
            *(one.client.resume("wanted", OUTPUT[:2]) for _ in range(60)), return_exceptions=True
        )
        outcomes = {type(result) if isinstance(result, Exception) else tuple(result.token_ids) for result in results}
        assert outcomes <= {errors.FencedError, errors.OverloadedError, tuple(OUTPUT)}
        await nothing_running(one.client)
        assert (await one.client.resume("wanted", OUTPUT[:2])).token_ids == OUTPUT
        assert (await one.client.generate(SPEC)).token_ids == OUTPUT  # every place is free again


async def test_a_flood_of_cancels_is_refused_at_some_point_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as one:
        one.verifier.round_s = SLOW_S
        call = one.client.call(SPEC, "calm")
        answer = await read_until_tokens(call, 2)
        monkeypatch.setattr(sessions, "_MAX_CANCELLING", 1)
        entered, held = asyncio.Event(), asyncio.Event()
        cancel = SessionStore.cancel

        async def slow(*arguments: Any) -> bool:
            entered.set()
            await held.wait()
            return await cancel(*arguments)

        monkeypatch.setattr(SessionStore, "cancel", slow)
        first = asyncio.create_task(one.client.cancel("guess-first"))
        await entered.wait()
        results = await asyncio.gather(
            *(one.client.cancel(f"guess-{number}") for number in range(100)), return_exceptions=True
        )
        assert {type(result) for result in results} == {errors.OverloadedError}
        held.set()
        assert await first is False
        assert (await read_until_tokens(call, 24, answer)).token_ids == OUTPUT
