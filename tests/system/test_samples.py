"""Several samples of one request over real gRPC: one stream, a session for each, and all that can happen to them."""

import asyncio
import dataclasses

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.ids import Epoch, SessionId
from specdec.messages import Fenced, PromptLogprobs, Started
from specdec.params import FinishReason, SpeculationOptions, StopCriteria
from specdec.v1 import admin_pb2
from tests.system.fakes import (
    FakeDrafter,
    FakeVerifier,
    detached,
    expected_logprobs,
    expected_output,
    served_drafter,
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
    Samples,
    all_samples,
    drained,
    error_of,
    frames,
    nothing_running,
    orchestrator,
    read_until_all_have_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system

NUM_SAMPLES = 4
NAMES = [f"group.{index}" for index in range(NUM_SAMPLES)]
OUTPUTS = [expected_output(tokenise(PROMPT), 24, index) for index in range(NUM_SAMPLES)]
SAMPLED = dataclasses.replace(SPEC, num_samples=NUM_SAMPLES)
LONG = dataclasses.replace(SAMPLED, stop=StopCriteria(max_new_tokens=2000))


def token_ids_of(samples: Samples) -> list[list[int]]:
    return [answer.token_ids for answer in samples.answers]


async def closed(verifier: FakeVerifier, num_sessions: int = NUM_SAMPLES) -> None:
    """Until the verifier is rid of that many sessions."""
    async with asyncio.timeout(DEADLINE_S):
        for number in range(num_sessions):
            await (await verifier.session(number)).closed.wait()


# --- What a client gets ----------------------------------------------------------------------------------------------


async def test_samples_come_in_one_stream_that_begins_once_and_ends_when_all_have_ended(client: Client) -> None:
    seen = [frame async for frame in frames(client.call(SAMPLED, "group"))]
    started = seen[0]
    assert isinstance(started, Started)
    assert (started.session_id, list(started.sample_session_ids)) == ("group", NAMES)
    assert sum(isinstance(frame, Started) for frame in seen) == 1
    samples = Samples(NUM_SAMPLES)
    for frame in seen:
        samples.add(frame)
    assert samples.num_finished == NUM_SAMPLES
    for answer, output in zip(samples.answers, OUTPUTS, strict=True):
        assert (answer.token_ids, answer.text) == (output, text_of(output))
        assert answer.finished is not None
        assert answer.finished.usage.num_output_tokens == 24


async def test_one_sample_is_a_session_without_a_suffix(client: Client, verifier: FakeVerifier) -> None:
    answer = await client.generate(dataclasses.replace(SPEC, num_samples=1), "single")
    assert answer.token_ids == OUTPUT
    assert answer.started is not None
    assert answer.started.sample_session_ids == ()
    assert (await verifier.session()).request.session_id == "single"


async def test_each_sample_is_a_session_that_differs_in_its_index_alone(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    await all_samples(client.call(SAMPLED, "group", "somebody"), NUM_SAMPLES)
    requests = sorted((session.request for session in verifier.sessions), key=lambda request: request.sample_index)
    assert [(request.session_id, request.sample_index) for request in requests] == [
        (name, index) for index, name in enumerate(NAMES)
    ]
    assert len({request.spec.sampling.seed for request in requests}) == 1
    assert len({request.owner_nonce for request in requests}) == NUM_SAMPLES
    assert {request.spec.num_samples for request in requests} == {1}
    assert {request.tenant for request in requests} == {"somebody"}
    for index, name in enumerate(NAMES):
        record = await record_in(store, name, RecordState.FINISHED)
        assert (record.sample_index, record.tenant) == (index, "somebody")
        assert record.token_ids == (*tokenise(PROMPT), *OUTPUTS[index])


async def test_all_samples_go_to_one_verifier_and_the_prompt_is_read_once(redis: EmbeddedStore) -> None:
    verifiers = [FakeVerifier() for _ in range(3)]
    async with (
        served_verifier(verifiers[0]) as first,
        served_verifier(verifiers[1]) as second,
        served_verifier(verifiers[2]) as third,
        orchestrator([first, second, third], redis=redis.url) as client,
    ):
        await routed(client, 4)
        for _ in range(3):
            await all_samples(client.call(SAMPLED), NUM_SAMPLES)
    counts = [len(verifier.sessions) for verifier in verifiers]
    assert sum(counts) == 3 * NUM_SAMPLES
    assert all(count % NUM_SAMPLES == 0 for count in counts)
    prompts = [session.request.spec.prompt for verifier in verifiers for session in verifier.sessions]
    assert prompts.count(PROMPT) == 3
    assert prompts.count(tokenise(PROMPT)) == 3 * (NUM_SAMPLES - 1)


async def test_another_verifier_takes_all_samples_where_one_takes_none(redis: EmbeddedStore) -> None:
    full, free = FakeVerifier(), FakeVerifier()
    full.refusal = errors.OverloadedError("full")
    async with (
        served_verifier(full) as first,
        served_verifier(free) as second,
        orchestrator([first, second], redis=redis.url) as client,
    ):
        await routed(client, 3)
        assert token_ids_of(await all_samples(client.call(SAMPLED), NUM_SAMPLES)) == OUTPUTS
        assert (len(full.sessions), len(free.sessions)) == (0, NUM_SAMPLES)


async def test_each_sample_has_a_drafter_that_is_told_which_sample_it_drafts_for(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s, drafter = SLOW_S, FakeDrafter()
    async with (
        served_verifier(verifier) as target,
        served_drafter(drafter) as helper,
        orchestrator([target], [helper], redis=redis.url) as client,
    ):
        await routed(client, 3)
        call = client.call(LONG, "group")
        await read_until_all_have_tokens(call, NUM_SAMPLES)
        await drafter.attachment(NUM_SAMPLES - 1)
        assert sorted((attach.session_id, attach.sample_index) for attach in drafter.attached) == [
            (name, index) for index, name in enumerate(NAMES)
        ]
        (await verifier.session()).injected.put_nowait(detached(1))
        again = await drafter.attachment(NUM_SAMPLES)
        assert (again.attachment_id, again.sample_index) == (2, (await verifier.session()).request.sample_index)
        call.cancel()


async def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_once(client: Client) -> None:
    spec = dataclasses.replace(SAMPLED, num_logprobs=2, num_prompt_logprobs=1)
    seen = [frame async for frame in frames(client.call(spec))]
    assert sum(isinstance(frame, PromptLogprobs) for frame in seen) == 1
    samples = Samples(NUM_SAMPLES)
    for frame in seen:
        samples.add(frame)
    for answer, output in zip(samples.answers, OUTPUTS, strict=True):
        assert tuple(answer.logprobs) == expected_logprobs(output, 2)
    assert tuple(samples.answers[0].prompt_logprobs) == expected_logprobs(tokenise(PROMPT)[1:], 1)


# --- Limits ----------------------------------------------------------------------------------------------------------


async def test_every_sample_counts_as_a_session_and_all_of_them_get_in_or_none(
    verifier: FakeVerifier, redis: EmbeddedStore
) -> None:
    verifier.round_s = SLOW_S
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url, max_sessions=6) as client,
    ):
        await routed(client)
        call = client.call(LONG)
        await read_until_all_have_tokens(call, NUM_SAMPLES)
        told = await error_of(drained(client.call(dataclasses.replace(SAMPLED, num_samples=3))))
        assert isinstance(told, errors.OverloadedError)
        assert told.retry_after_s is not None
        assert len(verifier.sessions) == NUM_SAMPLES
        told = await error_of(drained(client.call(dataclasses.replace(SAMPLED, num_samples=7))))
        assert isinstance(told, errors.InvalidParameterError)
        assert told.metadata == {"field": "num_samples"}
        call.cancel()
        await nothing_running(client)


async def test_a_client_cannot_choose_the_name_of_a_sample_nor_one_that_is_in_use(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.round_s = SLOW_S
    for spec in (SPEC, SAMPLED):
        assert isinstance(await error_of(drained(client.call(spec, "group.0"))), errors.InvalidParameterError)
    call = client.call(LONG, "group")
    await read_until_all_have_tokens(call, NUM_SAMPLES)
    for spec in (SPEC, SAMPLED):
        assert isinstance(await error_of(drained(client.call(spec, "group"))), errors.SessionExistsError)
    call.cancel()


async def test_a_stream_that_nobody_reads_is_cut_off_with_all_its_samples(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.padding = "x" * 50_000
    call = client.call(dataclasses.replace(LONG, stop=StopCriteria(max_new_tokens=20_000)))
    await closed(verifier)
    assert isinstance(await error_of(drained(call)), errors.SlowReaderError)
    await nothing_running(client)


# --- Ends ------------------------------------------------------------------------------------------------------------


async def test_a_sample_that_fails_ends_the_stream_and_frees_the_others_whose_records_stay(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(LONG, "group")
    samples = await read_until_all_have_tokens(call, NUM_SAMPLES)
    failing = await verifier.session(2)
    failing.injected.put_nowait(Fenced(Epoch(99)))  # of one alone
    assert isinstance(await error_of(drained(call)), errors.FencedError)
    await closed(verifier)
    await nothing_running(client)
    verifier.round_s = 0.0
    for index, name in enumerate(NAMES):
        await record_in(store, name, RecordState.OPEN)
        resumed = await client.resume(name, samples.answers[index].token_ids)
        assert resumed.token_ids == expected_output(tokenise(PROMPT), 2000, index)


async def test_a_sample_that_the_verifier_does_not_take_ends_the_stream_and_frees_the_others(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.round_s, verifier.refused_sample = SLOW_S, 3
    verifier.refusal = errors.OverloadedError("full by now")
    assert isinstance(await error_of(drained(client.call(LONG))), errors.OverloadedError)
    await closed(verifier, len(verifier.sessions))
    await nothing_running(client)


@pytest.mark.parametrize("refusal", [errors.PromptTooLongError("too long"), errors.OverloadedError("full")])
async def test_a_request_that_no_verifier_takes_is_refused_once(
    client: Client, verifier: FakeVerifier, refusal: errors.SpecdecError
) -> None:
    verifier.refusal = refusal
    assert isinstance(await error_of(drained(client.call(SAMPLED, "group"))), type(refusal))
    await nothing_running(client)
    verifier.refusal = None
    assert token_ids_of(await all_samples(client.call(SAMPLED, "group"), NUM_SAMPLES)) == OUTPUTS


async def test_a_client_that_vanishes_frees_all_samples_and_leaves_their_records(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(LONG, "group")
    await read_until_all_have_tokens(call, NUM_SAMPLES)
    assert await client.session_ids() == NAMES
    call.cancel()
    await closed(verifier)
    await nothing_running(client)
    for name in NAMES:
        await record_in(store, name, RecordState.OPEN)


async def test_cancelling_the_request_ends_every_sample_with_its_reason_and_deletes_their_records(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    running = asyncio.create_task(all_samples(client.call(LONG, "group"), NUM_SAMPLES))
    await verifier.session(NUM_SAMPLES - 1)
    assert await client.cancel("group")
    samples = await running
    assert [answer.finished and answer.finished.reason for answer in samples.answers] == [
        FinishReason.CANCELLED
    ] * NUM_SAMPLES
    await closed(verifier)
    for name in NAMES:
        record = await store.read(SessionId(name))
        assert record is not None
        assert (record.state, record.token_ids) == (RecordState.CANCELLED, None)
    assert not await client.cancel("group")


async def test_killing_the_request_or_one_sample_ends_no_other(client: Client, verifier: FakeVerifier) -> None:
    verifier.round_s = SLOW_S
    call = client.call(LONG, "group")
    samples = await read_until_all_have_tokens(call, NUM_SAMPLES)
    killed = await client.admin.KillSession(admin_pb2.KillSessionRequest(session_id=NAMES[1]), timeout=DEADLINE_S)
    assert killed.found
    assert await client.session_ids() == [NAMES[0], *NAMES[2:]]
    async for frame in frames(call):
        samples.add(frame)
        if min(len(samples.answers[index].token_ids) for index in (0, 2, 3)) > 20:
            break
    assert samples.num_finished == 1
    assert samples.answers[1].finished is not None
    assert samples.answers[1].finished.reason is FinishReason.CANCELLED
    killed = await client.admin.KillSession(admin_pb2.KillSessionRequest(session_id="group"), timeout=DEADLINE_S)
    assert killed.found
    async for frame in frames(call):
        samples.add(frame)
    assert samples.num_finished == NUM_SAMPLES
    killed = await client.admin.KillSession(admin_pb2.KillSessionRequest(session_id="group"), timeout=DEADLINE_S)
    assert not killed.found


async def test_another_replica_cancels_and_resumes_samples_by_their_records(redis: EmbeddedStore) -> None:
    verifier = FakeVerifier(round_s=SLOW_S)
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=redis.url) as one,
        orchestrator([target], redis=redis.url) as two,
    ):
        await asyncio.gather(routed(one), routed(two))
        call = one.call(dataclasses.replace(LONG, num_logprobs=1, num_prompt_logprobs=0), "group")
        samples = await read_until_all_have_tokens(call, NUM_SAMPLES)
        call.cancel()
        await nothing_running(one)
        verifier.round_s = 0.0
        received = samples.answers[2].token_ids
        resumed = await two.resume(NAMES[2], received)
        whole = expected_output(tokenise(PROMPT), 2000, 2)
        assert resumed.token_ids == whole
        assert resumed.finished is not None
        assert resumed.finished.sample_index == 2
        assert tuple(resumed.logprobs) == expected_logprobs(whole[len(received) :], 1)
        assert resumed.prompt_logprobs == []
        again = verifier.sessions[-1].request
        assert (again.session_id, again.sample_index) == (NAMES[2], 2)
        assert isinstance(await error_of(two.resume("group", [])), errors.UnknownSessionError)
        assert await two.cancel("group")
        for name in NAMES:
            assert isinstance(await error_of(two.resume(name, [])), errors.UnknownSessionError)


async def test_a_sample_that_is_resumed_elsewhere_ends_the_stream_that_nobody_reads_any_more(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(LONG, "group")
    samples = await read_until_all_have_tokens(call, NUM_SAMPLES)
    resuming = asyncio.create_task(client.resume(NAMES[0], samples.answers[0].token_ids))
    assert isinstance(await error_of(drained(call)), errors.FencedError)
    verifier.round_s = 0.0
    assert (await resuming).token_ids == expected_output(tokenise(PROMPT), 2000)


async def test_samples_begin_while_redis_is_away(verifier: FakeVerifier, redis: EmbeddedStore) -> None:
    await redis.stop()
    async with served_verifier(verifier) as target, orchestrator([target], redis=redis.url) as client:
        await routed(client)
        spec = dataclasses.replace(SAMPLED, speculation=SpeculationOptions(disabled=True))
        assert token_ids_of(await all_samples(client.call(spec), NUM_SAMPLES)) == OUTPUTS
