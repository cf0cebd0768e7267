"""What verifiers and drafters do while an output streams, and an orchestrator that stops."""

import asyncio
import dataclasses
import hashlib
import hmac
import time

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.local_store import free_port
from specdec.params import (
    AcceptanceRule,
    SamplingParams,
    SpeculationOptions,
)
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
    OUTPUT,
    PROMPT,
    SLOW_S,
    SPEC,
    Client,
    drained,
    error_of,
    long_spec,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system


# --- Drafters ---------------------------------------------------------------------------------------------------------


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


# --- Verifiers --------------------------------------------------------------------------------------------------------


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


async def test_where_no_verifier_is_left_the_stream_ends_after_a_while_and_the_record_can_be_resumed(
    redis: EmbeddedStore, store: SessionStore
) -> None:
    verifier, port = FakeVerifier(round_s=SLOW_S), free_port()
    async with orchestrator([f"127.0.0.1:{port}"], redis=redis.url, failover_timeout_s=0.5) as client:
        async with served_verifier(verifier, f"127.0.0.1:{port}"):
            await routed(client)
            call = client.call(SPEC, "lost")
            answer = await read_until_tokens(call, 6)
        told = await error_of(drained(call))
        assert isinstance(told, errors.VerifierLostError)
        assert told.metadata == {"session_id": "lost", "resumable": "true"}
        assert told.retry_after_s is not None
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
    verifier.round_s = 0.0
    await read_until_tokens(call, 2000, answer)
    assert answer.token_ids == expected_output(tokenise(PROMPT), 2000)
    again = (await verifier.session(1)).request  # from before that round, in an epoch of its own
    assert again.epoch == 2


# --- Draining ---------------------------------------------------------------------------------------------------------


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
            ended = asyncio.create_task(error_of(drained(call)))
        told = await ended
        assert isinstance(told, errors.DrainingError)
        assert told.metadata == {"session_id": "drained", "resumable": "true"}
        assert told.retry_after_s is not None
        await other.channel.close()
        verifier.round_s = 0.0
        assert answer.token_ids
        async with orchestrator([target], redis=redis.url) as client:
            await routed(client)
            resumed = await client.resume("drained", answer.token_ids)
            assert resumed.token_ids == expected_output(tokenise(PROMPT), 2000)
