"""Streams that break and go on, and a session store that goes away."""

import asyncio

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore, StoreSettings
from specdec import errors
from specdec.ids import SessionId
from specdec.messages import Started
from specdec.params import (
    GenerationSpec,
)
from tests.system.fakes import (
    FakeVerifier,
    expected_output,
    served_verifier,
    text_of,
    tokenise,
)
from tests.system.orchestrator_harness import (
    OUTPUT,
    PROMPT,
    SLOW_S,
    SPEC,
    Client,
    drained,
    error_of,
    frames,
    long_spec,
    nothing_running,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system


# --- Resume -----------------------------------------------------------------------------------------------------------


async def test_a_broken_stream_is_resumed_without_a_lost_or_repeated_token(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(SPEC, "broken")
    answer = await read_until_tokens(call, 6)
    call.cancel()
    verifier.round_s = 0.0
    resumed = await client.resume("broken", answer.token_ids)
    assert resumed.token_ids == OUTPUT
    assert answer.text + resumed.text == text_of(OUTPUT)
    assert answer.started is not None
    assert resumed.started is not None
    assert resumed.started.seed == answer.started.seed
    again = (await verifier.session(1)).request
    assert (again.prompt_length, again.epoch) == (5, 2)
    record = await record_in(store, "broken", RecordState.FINISHED)
    assert record.token_ids == (*tokenise(PROMPT), *OUTPUT)


async def test_a_finished_output_is_resumed_from_wherever_the_client_stands(
    client: Client, store: SessionStore
) -> None:
    await client.generate(SPEC, "finished")
    await record_in(store, "finished", RecordState.FINISHED)
    for num_received in (0, 7, 24):
        resumed = await client.resume("finished", OUTPUT[:num_received])
        assert resumed.token_ids == OUTPUT
        assert resumed.finished is not None


async def test_resuming_with_foreign_tokens_or_without_a_session_is_refused(
    client: Client, store: SessionStore
) -> None:
    await client.generate(SPEC, "mine")
    await record_in(store, "mine", RecordState.FINISHED)
    invented = [*OUTPUT, *[OUTPUT[0]] * 5000]
    for wrong in ([*OUTPUT[:3], -1], [OUTPUT[0], OUTPUT[1] + 1], invented):
        assert isinstance(await error_of(client.resume("mine", wrong)), errors.ResumeMismatchError)
    assert isinstance(await error_of(client.resume("nobody", [])), errors.UnknownSessionError)


async def test_a_resume_on_another_replica_takes_the_session_over_at_once(redis: EmbeddedStore) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, lease_s=1.0) as one,
        orchestrator([target], redis=redis.url, lease_s=1.0) as two,
    ):
        await asyncio.gather(routed(one), routed(two))
        call = one.call(long_spec(400), "moved")
        answer = await read_until_tokens(call, 4)
        verifier.round_s = 0.0
        resumed = await two.resume("moved", answer.token_ids)
        assert resumed.token_ids == expected_output(tokenise(PROMPT), 400)
        # The old stream's client is told, unless it had all that its owner was given before.
        told = await asyncio.gather(drained(call), return_exceptions=True)
        assert isinstance(told[0], errors.FencedError | None)


async def test_without_stored_tokens_a_resume_brings_its_prompt(redis: EmbeddedStore) -> None:
    spec = GenerationSpec(prompt=(3, 1, 2))
    output = expected_output((3, 1, 2), 24)
    async with (
        served_verifier(FakeVerifier()) as target,
        orchestrator([target], redis=redis.url, store_tokens=False) as client,
    ):
        await routed(client)
        await client.generate(spec, "bare")
        await nothing_running(client)
        assert isinstance(await error_of(client.resume("bare", output[:4])), errors.NotOfferedError)
        wrong = [*output[:-1], output[-1] + 1]
        assert isinstance(await error_of(client.resume("bare", wrong, spec)), errors.ResumeMismatchError)
        assert (await client.resume("bare", output[:4], spec)).token_ids == output


# --- Redis ------------------------------------------------------------------------------------------------------------


async def test_relaxed_streams_go_on_while_redis_is_away_and_are_recorded_when_it_is_back(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s = SLOW_S
    async with served_verifier(verifier) as target, orchestrator([target], redis=redis.url) as client:
        await routed(client)
        call = client.call(long_spec(400), "outage")
        answer = await read_until_tokens(call, 4)
        await redis.stop()
        await read_until_tokens(call, len(answer.token_ids) + 10, answer)
        async with (
            EmbeddedStore(port=redis.port, password=redis.password) as back,
            SessionStore(StoreSettings(back.url)) as store,
        ):
            record = await record_in(store, "outage", RecordState.OPEN)
            assert record.committed_length > 14
            verifier.round_s = 0.0
            await drained(call)
            record = await record_in(store, "outage", RecordState.FINISHED)
            assert record.token_ids == (*tokenise(PROMPT), *expected_output(tokenise(PROMPT), 400))


async def test_relaxed_streams_begin_while_redis_is_away(verifier: FakeVerifier, redis: EmbeddedStore) -> None:
    await redis.stop()
    verifier.highest_epoch["known"] = 3
    async with served_verifier(verifier) as target, orchestrator([target], redis=redis.url) as client:
        await routed(client)
        assert (await client.generate(SPEC, "fresh")).token_ids == OUTPUT
        assert (await client.generate(SPEC, "known")).token_ids == OUTPUT
        assert [session.request.epoch for session in verifier.sessions] == [1, 4]
        assert not (await client.cluster()).store_healthy


async def test_strict_streams_neither_begin_nor_go_on_without_redis(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s = SLOW_S
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, durability="strict") as client,
    ):
        await routed(client)
        call = client.call(long_spec(), "strict")
        await read_until_tokens(call, 4)
        await redis.stop()
        assert isinstance(await error_of(drained(call)), errors.StoreUnavailableError)
        assert isinstance(await error_of(client.generate(SPEC)), errors.StoreUnavailableError)
        await asyncio.wait_for((await verifier.session()).closed.wait(), 2.0)


async def test_strict_tokens_are_in_the_record_before_the_client_has_them(
    verifier: FakeVerifier, redis: EmbeddedStore, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, durability="strict") as client,
    ):
        await routed(client)
        seen = 0
        async for frame in frames(client.call(SPEC, "strict")):
            if not isinstance(frame, Started) and hasattr(frame, "token_ids"):
                seen += len(frame.token_ids)
                record = await store.read(SessionId("strict"))
                assert record is not None
                assert record.committed_length >= len(PROMPT) + seen
        assert seen == 24


async def test_an_owner_that_lost_its_session_stops_streaming(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(long_spec(), "stolen")
    await read_until_tokens(call, 2)
    await store.cancel(SessionId("stolen"))
    assert isinstance(await error_of(drained(call)), errors.FencedError)
