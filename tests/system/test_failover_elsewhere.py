"""Where a session that loses or leaves its verifier goes on, until when, and what is told where it cannot."""

import asyncio
import dataclasses

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore, StoreSettings
from specdec import errors
from specdec.messages import Draining
from tests.system.fakes import (
    FakeDrafter,
    FakeVerifier,
    expected_output,
    served_drafter,
    text_of,
)
from tests.system.fleet import PROMPT_IDS, STANDS_STILL_S, fleet, hurry, read_to_the_end, slow_verifiers
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    OUTPUT,
    SLOW_S,
    SPEC,
    Client,
    drained,
    error_of,
    eventually,
    long_spec,
    nothing_running,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)
from tests.system.store_fixtures import PROMPT as RECORDED_PROMPT
from tests.system.store_fixtures import opened

pytestmark = pytest.mark.system


# --- Draining ---------------------------------------------------------------------------------------------------------


async def test_a_draining_verifier_is_left_for_another(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        first = await some.holder()
        session = await some.verifiers[first].session()
        session.injected.put_nowait(Draining(DEADLINE_S))
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        assert session.closed.is_set()
        assert len(some.verifiers[1 - first].sessions) == 1


async def test_a_draining_verifier_is_read_to_the_end_where_there_is_no_other(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers(1)) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        (await some.verifiers[0].session()).injected.put_nowait(Draining(DEADLINE_S))
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert answer.finished is not None
        assert answer.finished.num_failovers == 0


# --- Numerics ---------------------------------------------------------------------------------------------------------


async def test_where_no_equal_verifier_is_left_another_goes_on_and_the_client_is_told(redis: EmbeddedStore) -> None:
    verifiers = slow_verifiers()
    verifiers[1].numerics = "other bits"
    async with fleet(*verifiers, num_started=1) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 2)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        verifiers[0].round_s = STANDS_STILL_S  # for as long as it takes the other to come up
        await some.start(1)
        await routed(client, 3)
        await some.lose(0)
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert answer.finished is not None
        assert (answer.finished.num_failovers, answer.finished.numerics_changed) == (1, True)


async def test_an_equal_verifier_is_preferred_to_an_idle_one(redis: EmbeddedStore) -> None:
    verifiers = slow_verifiers(3)
    verifiers[2].numerics = "other bits"
    async with fleet(*verifiers, num_started=2) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        calls = [client.call(long_spec(), f"s{index}") for index in range(4)]
        answers = [await read_until_tokens(call, 2) for call in calls]
        await some.start(2)
        await routed(client, 4)
        await some.lose(0)
        hurry(some)
        for call, answer in zip(calls, answers, strict=True):
            assert (await read_to_the_end(call, answer)).token_ids == expected_output(PROMPT_IDS, 2000)
        assert verifiers[2].sessions == []


async def test_who_wants_equal_numerics_alone_is_told_and_resumes_when_they_are_back(redis: EmbeddedStore) -> None:
    verifiers = slow_verifiers()
    verifiers[1].numerics = "other bits"
    spec = dataclasses.replace(SPEC, same_numerics_only=True)
    async with (
        fleet(*verifiers, num_started=1) as some,
        orchestrator(some.endpoints, redis=redis.url, failover_timeout_s=0.5) as client,
    ):
        await routed(client, 2)
        call = client.call(spec, "strict")
        answer = await read_until_tokens(call, 4)
        verifiers[0].round_s = STANDS_STILL_S  # for as long as it takes the other to come up
        await some.start(1)
        await routed(client, 3)
        await some.lose(0)
        told = await error_of(read_to_the_end(call, answer))
        assert isinstance(told, errors.NumericsUnavailableError)
        assert told.metadata["session_id"] == "strict"
        assert isinstance(await error_of(client.resume("strict", answer.token_ids)), errors.NumericsUnavailableError)
        hurry(some)
        await some.start(0)
        await routed(client, 3)
        assert (await client.resume("strict", answer.token_ids)).token_ids == OUTPUT
        assert verifiers[1].sessions == []


# --- None is left -----------------------------------------------------------------------------------------------------


async def test_a_session_waits_for_a_verifier_that_comes_back(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers(1)) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        await some.lose(0)

        async def noticed() -> bool:
            return sum(endpoint.healthy for endpoint in (await client.cluster()).endpoints) == 1

        await eventually(noticed)
        await some.start(0)
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))


@pytest.mark.parametrize("failure", [errors.PeerUnavailableError("the link broke"), errors.SpecdecError("a fault")])
async def test_a_lone_verifier_whose_stream_broke_has_the_session_again(
    client: Client, verifier: FakeVerifier, failure: errors.SpecdecError
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(SPEC)
    answer = await read_until_tokens(call, 4)
    (await verifier.session()).injected.put_nowait(failure)
    answer = await read_to_the_end(call, answer)
    assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
    assert [session.request.epoch for session in verifier.sessions] == [1, 2]


async def test_a_session_that_every_verifier_fails_on_ends_after_a_few(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        for verifier in some.verifiers:
            verifier.failure = errors.SpecdecError("the engine failed")
        assert isinstance(await error_of(client.generate(SPEC)), errors.VerifierLostError)
        assert sum(len(verifier.sessions) for verifier in some.verifiers) < 12


async def test_an_owner_that_is_fenced_on_its_way_to_another_verifier_ends(
    redis: EmbeddedStore, store: SessionStore
) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(SPEC, "fenced")
        await read_until_tokens(call, 4)
        first = await some.holder()
        some.verifiers[1 - first].highest_epoch["fenced"] = 40
        await some.lose(first)
        assert isinstance(await error_of(drained(call)), errors.FencedError)
        assert (await record_in(store, "fenced", RecordState.OPEN)).epoch == 2


# --- Deadlines --------------------------------------------------------------------------------------------------------


async def test_a_clients_deadline_travels_with_the_session_to_each_verifier_and_drafter(redis: EmbeddedStore) -> None:
    drafter = FakeDrafter()
    async with (
        fleet(*slow_verifiers()) as some,
        served_drafter(drafter) as helper,
        orchestrator(some.endpoints, [helper], redis=redis.url) as client,
    ):
        await routed(client, 4)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        first = await some.holder()
        await some.lose(first)
        await read_to_the_end(call, answer)
        given = [(await some.verifiers[number].session()).time_left_s for number in (first, 1 - first)]
        assert given[0] is not None
        assert given[1] is not None
        assert DEADLINE_S + 1.0 > given[0] > given[1]  # gRPC rounds a deadline up
        await drafter.attachment()
        assert drafter.times_left_s[0] is not None
        assert drafter.times_left_s[0] < DEADLINE_S + 1.0  # without a deadline it would be 40 s


async def test_a_session_ends_at_its_clients_deadline(client: Client, verifier: FakeVerifier) -> None:
    verifier.round_s = STANDS_STILL_S
    call = client.call(SPEC, timeout_s=1.0)
    assert isinstance(await error_of(drained(call)), errors.DeadlineError)
    async with asyncio.timeout(DEADLINE_S):
        await (await verifier.session()).closed.wait()
    await nothing_running(client)


# --- Resume -----------------------------------------------------------------------------------------------------------


async def test_a_resumed_session_offers_the_verifier_what_its_record_has_beyond_the_client(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    await client.generate(SPEC, "behind")
    await record_in(store, "behind", RecordState.FINISHED)
    resumed = await client.resume("behind", OUTPUT[:5])
    assert resumed.token_ids == OUTPUT
    request = (await verifier.session(1)).request
    assert (tuple(request.recorded_token_ids), request.recorded_epoch) == (tuple(OUTPUT[5:]), 1)


async def test_a_session_whose_owner_died_is_resumed_although_its_lease_still_runs(redis: EmbeddedStore) -> None:
    async with (
        SessionStore(StoreSettings(redis.url, lease_s=600.0)) as dead_owners,
        fleet(FakeVerifier()) as some,
        orchestrator(some.endpoints, redis=redis.url) as client,
    ):
        await routed(client)
        lease = await opened(dead_owners, "orphan")
        resumed = await client.resume("orphan", [], tenant="somebody")
        assert resumed.token_ids == expected_output(RECORDED_PROMPT, 24, 3)
        assert (await some.verifiers[0].session()).request.epoch == lease.epoch + 1
