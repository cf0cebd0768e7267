"""Resume where the record keeps no tokens: the original request and what the client received are enough."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState, SessionRecord
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.ids import SessionId
from specdec.params import ChatMessage, GenerationSpec, Prompt, SamplingParams, StopCriteria
from tests.system.fakes import FakeVerifier, expected_output, served_verifier, text_of, tokenise
from tests.system.orchestrator_harness import (
    SLOW_S,
    Client,
    error_of,
    eventually,
    nothing_running,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system

NUM_TOKENS = 24
CHAT = (ChatMessage("system", "be brief"), ChatMessage("user", "hello"))
PROMPTS: list[Prompt] = ["hello", "h", CHAT]
TEXT = "hello"
OUTPUT = expected_output(tokenise(TEXT), NUM_TOKENS)


def spec_of(prompt: Prompt) -> GenerationSpec:
    """Sampled without a seed: the server chooses one."""
    sampling = SamplingParams(temperature=0.5, logit_bias={3: 0.1})
    return GenerationSpec(prompt, sampling=sampling, stop=StopCriteria(max_new_tokens=NUM_TOKENS))


SPEC = spec_of(TEXT)


@contextlib.asynccontextmanager
async def served(redis: EmbeddedStore, *verifiers: FakeVerifier) -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(served_verifier(verifier)) for verifier in verifiers]
        client = await stack.enter_async_context(orchestrator(targets, redis=redis.url, store_tokens=False))
        await routed(client, 1 + len(verifiers))
        yield client


async def broken_stream(client: Client, spec: GenerationSpec, num_tokens: int = 6) -> tuple[list[int], str]:
    """What a client has of session `s`, whose stream it lost."""
    call = client.call(spec, "s")
    answer = await read_until_tokens(call, num_tokens)
    call.cancel()
    await nothing_running(client)
    return answer.token_ids, answer.text


async def record_of(store: SessionStore) -> SessionRecord:
    record = await store.read(SessionId("s"))
    assert record is not None
    return record


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_text_or_a_chat_is_resumed_with_the_original_request(
    redis: EmbeddedStore, store: SessionStore, prompt: Prompt
) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    output = expected_output(tokenise(prompt), NUM_TOKENS)
    async with served(redis, verifier) as client:
        received, text = await broken_stream(client, spec_of(prompt))
        verifier.round_s = 0.0
        resumed = await client.resume("s", received, spec_of(prompt))
        assert resumed.token_ids == output
        assert text + resumed.text == text_of(output)
        assert resumed.started is not None
        assert resumed.started.num_prompt_tokens == len(tokenise(prompt))
        first, again = [session.request for session in verifier.sessions]
        assert (again.prompt_length, list(again.committed_token_ids)) == (0, received)
        assert again.spec.prompt == prompt
        assert again.spec.sampling.seed == first.spec.sampling.seed
        record = await record_in(store, "s", RecordState.FINISHED)
        assert (record.token_ids, record.prompt_length) == (None, len(tokenise(prompt)))
        assert record.committed_length == len(tokenise(prompt)) + NUM_TOKENS
        assert record.agrees_with((*tokenise(prompt), *output))


async def test_a_finished_text_is_resumed_from_wherever_the_client_stands(
    redis: EmbeddedStore, store: SessionStore
) -> None:
    async with served(redis, FakeVerifier()) as client:
        await client.generate(SPEC, "s")
        await record_in(store, "s", RecordState.FINISHED)
        for num_received in (0, 1, 7, NUM_TOKENS - 1, NUM_TOKENS):
            resumed = await client.resume("s", OUTPUT[:num_received], SPEC)
            assert resumed.token_ids == OUTPUT
            assert resumed.finished is not None
            assert resumed.finished.usage.num_output_tokens == NUM_TOKENS


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ("hellp", OUTPUT[:6]),  # as long as the session's
        ("hellp", []),
        ("hell", OUTPUT[:6]),
        ("hell", [ord("o"), *OUTPUT[:5]]),  # the same tokens, divided a token earlier
        ("hello!", OUTPUT[1:6]),
        ((ChatMessage("user", "hallo"),), OUTPUT[:6]),
        (TEXT, [*OUTPUT[:5], OUTPUT[5] + 1]),
        (TEXT, [OUTPUT[0] + 1, *OUTPUT[1:6]]),
        (TEXT, OUTPUT[1:7]),
        (TEXT, [*OUTPUT, 1]),  # more than the session may have
    ],
)
async def test_what_is_not_the_session_s_is_refused_before_anything_is_told_and_leaves_the_session_as_it_was(
    redis: EmbeddedStore, store: SessionStore, prompt: Prompt, received: Sequence[int]
) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with served(redis, verifier) as client:
        own, _ = await broken_stream(client, SPEC, num_tokens=8)
        before = await record_of(store)
        error = await error_of(client.resume("s", received, spec_of(prompt)))
        assert isinstance(error, errors.ResumeMismatchError)
        await nothing_running(client)
        for session in verifier.sessions:
            await asyncio.wait_for(session.closed.wait(), 5.0)
        after = await record_of(store)
        assert after.state is RecordState.OPEN
        for kept in ("request", "committed_length", "prefix_digest", "prompt_digest", "borders"):
            assert getattr(after, kept) == getattr(before, kept)
        verifier.round_s = 0.0
        assert (await client.resume("s", own, SPEC)).token_ids == OUTPUT


async def test_a_client_that_received_nothing_of_a_text_still_has_to_bring_the_right_one(
    redis: EmbeddedStore,
) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with served(redis, verifier) as client:
        received, _ = await broken_stream(client, SPEC)
        call = client.resume("s", received, SPEC)  # its owner's rounds begin behind what the client has
        resuming = asyncio.ensure_future(call)
        await verifier.session(1)
        resuming.cancel()
        await nothing_running(client)
        assert isinstance(await error_of(client.resume("s", [], spec_of("hellp"))), errors.ResumeMismatchError)
        verifier.round_s = 0.0
        assert (await client.resume("s", [], SPEC)).token_ids == OUTPUT


async def test_parameters_that_are_not_the_session_s_are_refused_and_missing_requests_too(redis: EmbeddedStore) -> None:
    verifier = FakeVerifier()
    async with served(redis, verifier) as client:
        await client.generate(SPEC, "s")
        await nothing_running(client)
        colder = dataclasses.replace(SPEC, sampling=dataclasses.replace(SPEC.sampling, temperature=0.25))
        error = await error_of(client.resume("s", OUTPUT[:4], colder))
        assert isinstance(error, errors.ResumeMismatchError)
        assert error.metadata["field"] == "sampling"
        assert isinstance(await error_of(client.resume("s", OUTPUT[:4])), errors.NotOfferedError)
        empty = dataclasses.replace(SPEC, prompt=())
        assert isinstance(await error_of(client.resume("s", OUTPUT[:4], empty)), errors.EmptyPromptError)
        assert len(verifier.sessions) == 1


async def test_a_session_that_was_resumed_from_text_goes_on_at_another_verifier(redis: EmbeddedStore) -> None:
    verifiers = [FakeVerifier(round_s=SLOW_S), FakeVerifier(round_s=SLOW_S)]
    async with served(redis, *verifiers) as client:
        received, _ = await broken_stream(client, SPEC)
        resuming = asyncio.ensure_future(client.resume("s", received, SPEC))

        async def resumed_at() -> FakeVerifier | None:
            return next((v for v in verifiers if v.sessions and v.sessions[-1].request.epoch == 2), None)

        first = await eventually(resumed_at)
        await first.sessions[-1].injected.put(errors.SpecdecError("its rounds fail"))
        for verifier in verifiers:
            verifier.round_s = 0.0
        resumed = await resuming
        assert resumed.token_ids == OUTPUT
        assert resumed.finished is not None
        assert resumed.finished.num_failovers == 1
        requests = [session.request for verifier in verifiers for session in verifier.sessions]
        last = max(requests, key=lambda request: request.epoch)
        assert (last.prompt_length, last.spec.prompt) == (len(TEXT), tokenise(TEXT))
        assert tuple(last.committed_token_ids[: len(TEXT)]) == tokenise(TEXT)


async def test_several_samples_of_a_text_are_resumed_with_the_one_request_that_asked_for_them(
    redis: EmbeddedStore,
) -> None:
    async with served(redis, FakeVerifier()) as client:
        spec = dataclasses.replace(SPEC, num_samples=2, num_prompt_logprobs=0)
        async for _ in client.call(spec, "s"):
            pass
        await nothing_running(client)
        for index in range(2):
            output = expected_output(tokenise(TEXT), NUM_TOKENS, index)
            assert (await client.resume(f"s.{index}", output[:3], spec)).token_ids == output
