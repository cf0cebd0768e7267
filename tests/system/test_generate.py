"""Generate over real gRPC: what clients send wrongly, and what goes wrong around a stream."""

import asyncio
import dataclasses
import hashlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState, SessionRecord
from orchestrator.session_store import SessionStore, StoreSettings
from specdec import errors
from specdec.ids import SessionId
from specdec.messages import Started
from specdec.params import (
    AcceptanceRule,
    ChatMessage,
    FinishReason,
    GenerationSpec,
    SamplingParams,
    SpeculationOptions,
    StopCriteria,
)
from specdec.v1 import common_pb2, generation_pb2
from tests.system.fakes import (
    SECRET,
    FakeDrafter,
    FakeVerifier,
    detached,
    expected_output,
    served_drafter,
    served_verifier,
    text_of,
    tokenise,
)
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    Client,
    error_of,
    frames,
    free_port,
    orchestrator,
    read_until_tokens,
)

pytestmark = pytest.mark.system

PROMPT = "hello"
OUTPUT = expected_output(tokenise(PROMPT), 24)
SPEC = GenerationSpec(prompt=PROMPT)
SLOW_S = 0.05


def long_spec(max_new_tokens: int = 2000) -> GenerationSpec:
    return dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=max_new_tokens))


@pytest_asyncio.fixture
async def redis() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore() as embedded:
        yield embedded


@pytest_asyncio.fixture
async def store(redis: EmbeddedStore) -> AsyncIterator[SessionStore]:
    async with SessionStore(StoreSettings(redis.url)) as session_store:
        yield session_store


@pytest_asyncio.fixture
async def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest_asyncio.fixture
async def client(verifier: FakeVerifier, redis: EmbeddedStore) -> AsyncIterator[Client]:
    async with served_verifier(verifier) as endpoint, orchestrator([endpoint], redis=redis.url) as connected:
        await routed(connected)
        yield connected


async def eventually(look: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    """Its first true answer."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await look()):  # noqa: ASYNC110 - what is looked at sets no event of ours
            await asyncio.sleep(0.02)
    return answer


async def routed(client: Client, num_healthy: int = 2) -> None:
    """Until so many servers are healthy, the orchestrator included."""

    async def enough() -> bool:
        return sum(endpoint.healthy for endpoint in (await client.cluster()).endpoints) >= num_healthy

    await eventually(enough)


async def nothing_running(client: Client) -> None:
    async def idle() -> bool:
        return await client.session_ids() == []

    await eventually(idle)


async def record_in(store: SessionStore, session_id: str, state: RecordState) -> SessionRecord:
    async def look() -> SessionRecord | None:
        record = await store.read(SessionId(session_id))
        return record if record is not None and record.state is state else None

    found = await eventually(look)
    assert isinstance(found, SessionRecord)
    return found


# --- A request that is right -----------------------------------------------------------------------------------------


async def test_an_output_streams_in_order_and_its_record_says_so(client: Client, store: SessionStore) -> None:
    answer = await client.generate(SPEC, "my-session")
    assert answer.token_ids == OUTPUT
    assert answer.text == text_of(OUTPUT)
    assert answer.started is not None
    assert answer.finished is not None
    assert (answer.started.session_id, answer.started.model) == ("my-session", "target")
    assert (answer.started.num_prompt_tokens, answer.started.numerics_fingerprint) == (5, "bits")
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.finished.usage.num_output_tokens == 24
    record = await record_in(store, "my-session", RecordState.FINISHED)
    assert record.token_ids == (*tokenise(PROMPT), *OUTPUT)
    assert (record.round, record.finish_reason) == (12, FinishReason.LENGTH)
    assert record.request is not None
    assert record.request.sampling.seed == answer.started.seed
    assert record.request.stop.max_new_tokens == 24


async def test_a_drawn_seed_is_told_and_sent_to_the_verifier_and_a_given_one_is_kept(
    client: Client, verifier: FakeVerifier
) -> None:
    drawn = await client.generate(SPEC)
    given = await client.generate(dataclasses.replace(SPEC, sampling=SamplingParams(seed=7)))
    assert drawn.started is not None
    assert given.started is not None
    assert verifier.sessions[0].request.spec.sampling.seed == drawn.started.seed
    assert (given.started.seed, verifier.sessions[1].request.spec.sampling.seed) == (7, 7)
    assert drawn.started.acceptance_rule is AcceptanceRule.COUPLED


async def test_chat_and_token_prompts_reach_the_verifier_as_they_are(client: Client, verifier: FakeVerifier) -> None:
    for prompt in ((ChatMessage("user", "hi"),), (3, 1, 2)):
        await client.generate(GenerationSpec(prompt=prompt))
        assert verifier.sessions[-1].request.spec.prompt == prompt


async def test_sessions_without_a_name_get_one_each(client: Client) -> None:
    answers = await asyncio.gather(*(client.generate(SPEC) for _ in range(8)))
    assert all(answer.token_ids == OUTPUT for answer in answers)
    assert len({answer.started.session_id for answer in answers if answer.started}) == 8


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error", "field"),
    [
        (GenerationSpec(prompt=""), errors.EmptyPromptError, None),
        (GenerationSpec(prompt=()), errors.EmptyPromptError, None),
        (
            dataclasses.replace(SPEC, sampling=SamplingParams(temperature=-1)),
            errors.InvalidParameterError,
            "temperature",
        ),
        (
            dataclasses.replace(SPEC, sampling=SamplingParams(temperature=math.nan)),
            errors.InvalidParameterError,
            "temperature",
        ),
        (
            dataclasses.replace(SPEC, sampling=SamplingParams(temperature=math.inf)),
            errors.InvalidParameterError,
            "temperature",
        ),
        (
            dataclasses.replace(SPEC, sampling=SamplingParams(temperature=1e30)),
            errors.InvalidParameterError,
            "temperature",
        ),
        (dataclasses.replace(SPEC, sampling=SamplingParams(top_k=-1)), errors.InvalidParameterError, "top_k"),
        (dataclasses.replace(SPEC, sampling=SamplingParams(top_p=0.0)), errors.InvalidParameterError, "top_p"),
        (dataclasses.replace(SPEC, sampling=SamplingParams(min_p=math.nan)), errors.InvalidParameterError, "min_p"),
        (
            dataclasses.replace(SPEC, sampling=SamplingParams(frequency_penalty=-3)),
            errors.InvalidParameterError,
            "frequency_penalty",
        ),
        (dataclasses.replace(SPEC, sampling=SamplingParams(seed=-1)), errors.InvalidParameterError, "seed"),
        (
            dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=0)),
            errors.InvalidParameterError,
            "max_new_tokens",
        ),
        (
            dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=-5)),
            errors.InvalidParameterError,
            "max_new_tokens",
        ),
        (
            dataclasses.replace(SPEC, stop=StopCriteria(stop_strings=("",))),
            errors.InvalidParameterError,
            "stop_strings",
        ),
        (dataclasses.replace(SPEC, num_logprobs=-1), errors.InvalidParameterError, "num_logprobs"),
        (dataclasses.replace(SPEC, num_logprobs=21), errors.InvalidParameterError, "num_logprobs"),
        (dataclasses.replace(SPEC, num_prompt_logprobs=-1), errors.InvalidParameterError, "num_prompt_logprobs"),
        (dataclasses.replace(SPEC, num_prompt_logprobs=21), errors.InvalidParameterError, "num_prompt_logprobs"),
        (dataclasses.replace(SPEC, num_samples=0), errors.InvalidParameterError, "num_samples"),
        (dataclasses.replace(SPEC, num_samples=17), errors.InvalidParameterError, "num_samples"),
        (dataclasses.replace(SPEC, num_samples=2**30), errors.InvalidParameterError, "num_samples"),
        (dataclasses.replace(SPEC, model="unheard-of"), errors.UnknownModelError, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_request_is_refused_by_name_and_reaches_no_verifier(
    client: Client, verifier: FakeVerifier, spec: GenerationSpec, error: type[errors.SpecdecError], field: str | None
) -> None:
    told = await error_of(client.generate(spec))
    assert type(told) is error
    assert told.metadata.get("field") == field
    assert verifier.sessions == []
    await nothing_running(client)


async def test_a_request_without_a_prompt_is_refused(client: Client) -> None:
    call = client.generation.Generate(generation_pb2.GenerateRequest(), timeout=DEADLINE_S)
    assert isinstance(await error_of(anext(frames(call))), errors.EmptyPromptError)


@pytest.mark.parametrize("name", ["with space", "x" * 65, "{tag}", "a/b"])
async def test_a_session_name_that_could_harm_a_key_is_refused(client: Client, name: str) -> None:
    assert isinstance(await error_of(client.generate(SPEC, name)), errors.InvalidParameterError)


async def test_a_message_over_the_limit_is_refused_and_the_next_one_served(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    async with (
        served_verifier(verifier) as endpoint,
        orchestrator([endpoint], redis=redis.url, wire={"max_message_bytes": 1 << 16}) as client,
    ):
        await routed(client)
        told = await error_of(client.generate(GenerationSpec(prompt="x" * (1 << 17))))
        assert isinstance(told, errors.MessageTooLargeError)
        assert (await client.generate(SPEC)).token_ids == OUTPUT


async def test_a_session_name_in_use_is_refused_running_or_finished(client: Client, verifier: FakeVerifier) -> None:
    verifier.round_s = SLOW_S
    call = client.call(long_spec(), "mine")
    await read_until_tokens(call, 2)
    assert isinstance(await error_of(client.generate(SPEC, "mine")), errors.SessionExistsError)
    call.cancel()
    verifier.round_s = 0.0
    await client.generate(SPEC, "done")
    assert isinstance(await error_of(client.generate(SPEC, "done")), errors.SessionExistsError)


async def test_what_only_the_verifier_can_refuse_is_passed_on_and_frees_the_name(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.refusal = errors.PromptTooLongError("too long")
    assert isinstance(await error_of(client.generate(SPEC, "again")), errors.PromptTooLongError)
    verifier.refusal = None
    await nothing_running(client)
    assert (await client.generate(SPEC, "again")).token_ids == OUTPUT


async def test_an_unreadable_rule_is_refused(client: Client) -> None:
    spec = common_pb2.GenerationSpec(text="x")
    spec.sampling.acceptance_rule = 99  # type: ignore[assignment]
    call = client.generation.Generate(generation_pb2.GenerateRequest(spec=spec), timeout=DEADLINE_S)
    told = await error_of(anext(frames(call)))
    assert told.status == "INVALID_ARGUMENT"


# --- Clients ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_vanishes_frees_its_rows_and_leaves_its_record(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(long_spec(), "vanished")
    await read_until_tokens(call, 4)
    session = await verifier.session()
    call.cancel()
    async with asyncio.timeout(2.0):
        await session.closed.wait()
    await nothing_running(client)
    record = await record_in(store, "vanished", RecordState.OPEN)
    assert record.token_ids is not None
    assert len(record.token_ids) >= len(PROMPT) + 4
    assert list(record.token_ids[len(PROMPT) :]) == expected_output(tokenise(PROMPT), record.committed_length - 5)


async def test_a_slow_reader_loses_its_stream_and_not_our_memory(client: Client, verifier: FakeVerifier) -> None:
    verifier.padding = "x" * 50_000
    call = client.call(long_spec(20_000), "slow")
    session = await verifier.session()
    async with asyncio.timeout(DEADLINE_S):
        await session.closed.wait()  # nobody reads, so the orchestrator gave up
    told = await error_of(_drained(call))
    assert isinstance(told, errors.SlowReaderError)
    assert session.num_rounds < 5_000


async def _drained(call: Any) -> None:
    async for _ in frames(call):
        pass


async def test_a_cancelled_session_ends_with_its_reason_and_its_record_is_gone(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    running = asyncio.create_task(client.generate(long_spec(), "stop-me"))
    await verifier.session()
    await asyncio.sleep(3 * SLOW_S)
    assert await client.cancel("stop-me")
    answer = await running
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.CANCELLED
    assert answer.finished.usage.num_output_tokens == len(answer.token_ids)
    record = await store.read(SessionId("stop-me"))
    assert record is not None
    assert (record.state, record.token_ids) == (RecordState.CANCELLED, None)
    assert not await client.cancel("stop-me")
    assert not await client.cancel("never-was")


# --- Drafters --------------------------------------------------------------------------------------------------------


async def test_a_drafter_is_attached_with_a_key_that_proves_who_sent_it_and_without_the_seed(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s, drafter = SLOW_S, FakeDrafter()
    async with (
        served_verifier(verifier) as target,
        served_drafter(drafter) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        call = client.call(dataclasses.replace(long_spec(), sampling=SamplingParams(seed=5)), "drafted")
        await read_until_tokens(call, 4)
        attach = await drafter.attachment()
        assert attach.attach_key == hmac.new(SECRET, (1).to_bytes(8, "big"), hashlib.sha256).digest()
        assert (attach.attachment_id, attach.verifier_endpoint, attach.session_id) == (1, target, "drafted")
        assert attach.sampling.seed is None
        assert attach.acceptance_rule is AcceptanceRule.COUPLED
        assert tuple(attach.known_token_ids[: attach.prompt_length]) == tokenise(PROMPT)
        assert attach.epoch == (await verifier.session()).request.epoch
        call.cancel()


async def test_a_drafter_that_comes_later_is_attached_within_about_a_second(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s, drafter, port = SLOW_S, FakeDrafter(), free_port()
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], [f"127.0.0.1:{port}"], redis=redis.url) as client,
    ):
        await routed(client)
        call = client.call(long_spec(), "later")
        await read_until_tokens(call, 10)
        async with served_drafter(drafter, f"127.0.0.1:{port}"):
            began = time.monotonic()
            await drafter.attachment()
            assert time.monotonic() - began < 1.5
        call.cancel()


async def test_a_detached_drafter_is_attached_again_with_a_higher_number(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s, drafter = SLOW_S, FakeDrafter()
    async with (
        served_verifier(verifier) as target,
        served_drafter(drafter) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        call = client.call(long_spec(), "again")
        answer = await read_until_tokens(call, 2)
        session = await verifier.session()
        await drafter.attachment(0)
        session.injected.put_nowait(detached(1))
        second = await drafter.attachment(1)
        assert second.attachment_id == 2
        session.injected.put_nowait(detached(1))  # old news
        await read_until_tokens(call, len(answer.token_ids) + 20, answer)
        assert len(drafter.attached) == 2
        call.cancel()


async def test_another_drafter_is_tried_where_one_is_refused(verifier: FakeVerifier, redis: EmbeddedStore) -> None:
    verifier.round_s, refused, taken = SLOW_S, FakeDrafter(), FakeDrafter()
    refused.refusal = errors.AttachRefusedError("no", refusal="TOKENIZER_MISMATCH")
    taken.refusal = None
    async with (
        served_verifier(verifier) as target,
        served_drafter(refused) as first,
        served_drafter(taken) as second,
        orchestrator([target], [first, second], redis=redis.url) as client,
    ):
        await routed(client, 4)
        calls = [client.call(long_spec(), f"s{number}") for number in range(3)]
        for call in calls:
            await read_until_tokens(call, 2)
        for number in range(3):
            await taken.attachment(number)
        for call in calls:
            call.cancel()


async def test_a_request_without_speculation_gets_no_drafter(verifier: FakeVerifier, redis: EmbeddedStore) -> None:
    drafter = FakeDrafter()
    async with (
        served_verifier(verifier) as target,
        served_drafter(drafter) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        for options in (SpeculationOptions(disabled=True), SpeculationOptions(max_draft_tokens=0)):
            await client.generate(dataclasses.replace(SPEC, speculation=options))
        assert drafter.attached == []


# --- Verifiers -------------------------------------------------------------------------------------------------------


async def test_no_verifier_at_all_is_told_as_such(redis: EmbeddedStore) -> None:
    async with orchestrator([f"127.0.0.1:{free_port()}"], redis=redis.url) as client:
        assert isinstance(await error_of(client.generate(SPEC)), errors.NoVerifierError)


async def test_another_verifier_is_tried_where_one_takes_no_more(redis: EmbeddedStore) -> None:
    full, free = FakeVerifier(), FakeVerifier()
    full.refusal = errors.OverloadedError("full")
    async with (
        served_verifier(full) as first,
        served_verifier(free) as second,
        orchestrator([first, second], redis=redis.url) as client,
    ):
        await routed(client, 3)
        for _ in range(4):
            assert (await client.generate(SPEC)).token_ids == OUTPUT
        free.refusal = full.refusal
        assert isinstance(await error_of(client.generate(SPEC)), errors.OverloadedError)


async def test_with_several_models_one_has_to_be_named(redis: EmbeddedStore) -> None:
    one, two = FakeVerifier("one"), FakeVerifier("two")
    async with (
        served_verifier(one) as first,
        served_verifier(two) as second,
        orchestrator([first, second], redis=redis.url) as client,
    ):
        await routed(client, 3)
        assert isinstance(await error_of(client.generate(SPEC)), errors.InvalidParameterError)
        answer = await client.generate(dataclasses.replace(SPEC, model="two"))
        assert answer.started is not None
        assert (answer.started.model, len(one.sessions)) == ("two", 0)


async def test_a_claim_that_a_verifier_fences_claims_again_above_it(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.highest_epoch["known"] = 41
    assert (await client.generate(SPEC, "known")).token_ids == OUTPUT
    assert (await verifier.session()).request.epoch == 42
    assert (await record_in(store, "known", RecordState.FINISHED)).epoch == 42


async def test_a_lost_verifier_ends_the_stream_and_leaves_a_record_that_can_be_resumed(
    redis: EmbeddedStore, store: SessionStore
) -> None:
    verifier, port = FakeVerifier(round_s=SLOW_S), free_port()
    async with orchestrator([f"127.0.0.1:{port}"], redis=redis.url) as client:
        async with served_verifier(verifier, f"127.0.0.1:{port}"):
            await routed(client)
            call = client.call(SPEC, "lost")
            answer = await read_until_tokens(call, 6)
        told = await error_of(_drained(call))
        assert isinstance(told, errors.VerifierLostError)
        await record_in(store, "lost", RecordState.OPEN)
        async with served_verifier(FakeVerifier(), f"127.0.0.1:{port}"):
            await routed(client)
            resumed = await client.resume("lost", answer.token_ids)
            assert resumed.token_ids == OUTPUT
            assert answer.text + resumed.text == text_of(OUTPUT)


async def test_a_verifier_that_skips_a_round_is_not_believed(client: Client, verifier: FakeVerifier) -> None:
    verifier.round_s = SLOW_S
    call = client.call(long_spec())
    answer = await read_until_tokens(call, 2)
    session = await verifier.session()
    session.num_rounds += 1
    assert isinstance(await error_of(_drained(call)), errors.VerifierLostError)
    assert len(answer.token_ids) >= 2


# --- Resume ----------------------------------------------------------------------------------------------------------


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


async def test_another_replica_resumes_once_the_lease_is_free(redis: EmbeddedStore) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, lease_s=1.0) as one,
        orchestrator([target], redis=redis.url, lease_s=1.0) as two,
    ):
        await asyncio.gather(routed(one), routed(two))
        call = one.call(long_spec(400), "moved")
        answer = await read_until_tokens(call, 4)
        # Its owner is alive and renews: nobody else may have it.
        assert isinstance(await error_of(two.resume("moved", answer.token_ids)), errors.FencedError)
        call.cancel()
        verifier.round_s = 0.0
        resumed = await two.resume("moved", answer.token_ids)
        assert resumed.token_ids == expected_output(tokenise(PROMPT), 400)


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


# --- Redis -----------------------------------------------------------------------------------------------------------


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
            await _drained(call)
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
        assert isinstance(await error_of(_drained(call)), errors.StoreUnavailableError)
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
    assert isinstance(await error_of(_drained(call)), errors.FencedError)


# --- Draining --------------------------------------------------------------------------------------------------------


async def test_a_stopping_orchestrator_tells_its_clients_to_resume_elsewhere(
    verifier: FakeVerifier, redis: EmbeddedStore, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    ended: asyncio.Task[errors.SpecdecError] | None = None
    async with served_verifier(verifier) as target:
        async with orchestrator([target], redis=redis.url) as client:
            await routed(client)
            other = Client(client.endpoint)
            call = other.call(long_spec(), "drained")
            answer = await read_until_tokens(call, 2)
            ended = asyncio.create_task(error_of(_drained(call)))
        assert isinstance(await ended, errors.DrainingError)
        await other.channel.close()
        verifier.round_s = 0.0
        assert answer.token_ids
        async with orchestrator([target], redis=redis.url) as client:
            await routed(client)
            resumed = await client.resume("drained", answer.token_ids)
            assert resumed.token_ids == expected_output(tokenise(PROMPT), 2000)
