"""Generate over real gRPC: what clients ask for rightly and wrongly, and how they leave."""

import asyncio
import dataclasses
import math

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.ids import SessionId
from specdec.params import (
    AcceptanceRule,
    ChatMessage,
    FinishReason,
    GenerationSpec,
    SamplingParams,
    StopCriteria,
)
from specdec.v1 import common_pb2, generation_pb2
from tests.system.fakes import (
    FakeVerifier,
    expected_output,
    served_verifier,
    text_of,
    tokenise,
)
from tests.system.orchestrator_harness import (
    DEADLINE_S,
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


# --- A request that is right ------------------------------------------------------------------------------------------


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


# --- Bad input --------------------------------------------------------------------------------------------------------


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


# --- Clients ----------------------------------------------------------------------------------------------------------


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
    told = await error_of(drained(call))
    assert isinstance(told, errors.SlowReaderError)
    assert session.num_rounds < 5_000


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
