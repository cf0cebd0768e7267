"""A session loses its verifier at every moment there is, and its client sees no more than a pause."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore, StoreSettings
from specdec import errors
from specdec.messages import Draining, Load, OpenSession, PromptLogprobs
from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from specdec.params import StopCriteria
from specdec.v1 import admin_pb2, verifier_pb2
from tests.system.fakes import (
    VOCABULARY_SIZE,
    Context,
    FakeDrafter,
    FakeSession,
    FakeVerifier,
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
    Answer,
    Client,
    Samples,
    drained,
    error_of,
    eventually,
    frames,
    free_port,
    long_spec,
    nothing_running,
    orchestrator,
    read_until_all_have_tokens,
    read_until_tokens,
    record_in,
    routed,
)
from tests.system.store_fixtures import PROMPT as RECORDED_PROMPT
from tests.system.store_fixtures import opened

pytestmark = pytest.mark.system

PROMPT_IDS = tokenise(PROMPT)
STANDS_STILL_S = 60.0
"""Between two rounds: nothing is committed before the verifier is lost."""


class Fleet:
    """Verifiers that may be lost one by one, by their number."""

    def __init__(self, verifiers: Sequence[FakeVerifier]) -> None:
        self.verifiers = list(verifiers)
        self._endpoints = [f"127.0.0.1:{free_port()}" for _ in verifiers]
        self._servers = [contextlib.AsyncExitStack() for _ in verifiers]

    @property
    def endpoints(self) -> list[str]:
        return list(self._endpoints)

    async def start(self, number: int) -> None:
        serving = served_verifier(self.verifiers[number], self._endpoints[number])
        await self._servers[number].enter_async_context(serving)

    async def lose(self, number: int) -> None:
        await self._servers[number].aclose()

    async def holder(self, num_sessions: int = 1) -> int:
        """Who was the last to take a session, once so many were taken in all."""

        async def look() -> bool:
            return sum(len(verifier.sessions) for verifier in self.verifiers) >= num_sessions

        await eventually(look)
        (number,) = (number for number, verifier in enumerate(self.verifiers) if not _are_closed(verifier.sessions))
        return number


def _are_closed(sessions: Sequence[FakeSession]) -> bool:
    return all(session.closed.is_set() for session in sessions)


@contextlib.asynccontextmanager
async def fleet(*verifiers: FakeVerifier, num_started: int | None = None) -> AsyncIterator[Fleet]:
    """Serves the first so many of them, None: all."""
    some = Fleet(verifiers)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(len(verifiers)):
            stack.push_async_callback(some.lose, number)
        for number in range(len(verifiers) if num_started is None else num_started):
            await some.start(number)
        yield some


def slow_verifiers(number: int = 2, **options: float) -> list[FakeVerifier]:
    return [FakeVerifier(**{"round_s": SLOW_S, **options}) for _ in range(number)]  # type: ignore[arg-type]


def hurry(some: Fleet) -> None:
    for verifier in some.verifiers:
        verifier.round_s = 0.0


async def read_to_the_end(call: object, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames(call):
            answer.add(frame)
    assert answer.finished is not None
    return answer


async def test_no_token_and_no_text_is_lost_or_repeated_when_a_verifier_is_lost_in_mid_stream(
    redis: EmbeddedStore, store: SessionStore
) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(SPEC, "moved")
        answer = await read_until_tokens(call, 6)
        first = await some.holder()
        before = some.verifiers[first].sessions[0].request
        await some.lose(first)
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        assert answer.finished is not None
        assert (answer.finished.num_failovers, answer.finished.numerics_changed) == (1, False)
        assert answer.finished.usage.num_output_tokens == 24
        assert answer.finished.speculative.num_draft_tokens == 24  # of both verifiers
        again = (await some.verifiers[1 - first].session()).request
        assert (before.epoch, again.epoch, again.owner_nonce) == (1, 2, before.owner_nonce)
        assert tuple(again.committed_token_ids)[:11] == (*PROMPT_IDS, *OUTPUT[:6])
        record = await record_in(store, "moved", RecordState.FINISHED)
        assert (record.epoch, record.verifier) == (2, some.endpoints[1 - first])
        assert record.token_ids == (*PROMPT_IDS, *OUTPUT)


async def test_a_verifier_may_be_lost_before_it_has_taken_the_session(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        for verifier in some.verifiers:
            verifier.may_open.clear()
        reading = asyncio.create_task(client.generate(SPEC, "early"))
        first = await some.holder()
        some.verifiers[1 - first].may_open.set()
        await some.lose(first)
        answer = await reading
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        assert (await some.verifiers[1 - first].session()).request.epoch == 2  # the lost one may have taken it


async def test_a_verifier_may_be_lost_before_its_first_commit_and_what_was_told_of_the_prompt_is_not_told_again(
    redis: EmbeddedStore,
) -> None:
    spec = dataclasses.replace(SPEC, num_prompt_logprobs=1)
    async with (
        fleet(*slow_verifiers(round_s=STANDS_STILL_S)) as some,
        orchestrator(some.endpoints, redis=redis.url) as client,
    ):
        await routed(client, 3)
        call, answer = client.call(spec), Answer()
        async for frame in frames(call):
            answer.add(frame)
            if isinstance(frame, PromptLogprobs):
                break
        first = await some.holder()
        some.verifiers[1 - first].round_s = 0.0
        await some.lose(first)
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert answer.prompt_logprobs == list(expected_logprobs(PROMPT_IDS[1:], 1))


async def test_a_verifier_may_be_lost_behind_the_last_token(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        for verifier in some.verifiers:
            verifier.may_finish.clear()
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 24)
        first = await some.holder()
        some.verifiers[1 - first].may_finish.set()
        await some.lose(first)
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))


async def test_one_verifier_after_the_other_may_be_lost(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers(3)) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 4)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        await some.lose(await some.holder())
        answer = await read_until_tokens(call, 8, answer)
        await some.lose(await some.holder(2))
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        assert answer.finished is not None
        assert answer.finished.num_failovers == 2


async def test_a_session_moves_while_the_store_is_away_too(redis: EmbeddedStore) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        await redis.stop()
        first = await some.holder()
        await some.lose(first)
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert (await some.verifiers[1 - first].session()).request.epoch == 2


@pytest.mark.parametrize("durability", ["relaxed", "strict"])
async def test_tokens_that_the_next_verifier_had_kept_are_told_once_and_their_text_too(
    redis: EmbeddedStore, store: SessionStore, durability: str
) -> None:
    async with (
        fleet(*slow_verifiers()) as some,
        orchestrator(some.endpoints, redis=redis.url, durability=durability) as client,
    ):
        await routed(client, 3)
        for verifier in some.verifiers:
            verifier.num_kept_tokens = 3
        call = client.call(SPEC, "kept")
        answer = await read_until_tokens(call, 4)
        await some.lose(await some.holder())
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        assert (await record_in(store, "kept", RecordState.FINISHED)).token_ids == (*PROMPT_IDS, *OUTPUT)


async def test_tokens_whose_text_the_next_verifier_had_not_told_when_it_was_lost_are_not_told_before(
    redis: EmbeddedStore,
) -> None:
    async with fleet(*slow_verifiers(3)) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 4)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 4)
        first = await some.holder()
        for verifier in some.verifiers:
            verifier.num_kept_tokens, verifier.round_s = 3, STANDS_STILL_S
        await some.lose(first)
        second = await some.holder(2)
        (third,) = {0, 1, 2} - {first, second}
        some.verifiers[third].round_s = 0.0

        async def taken() -> bool:
            sessions = (await client.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
            return [session.verifier_endpoint for session in sessions] == [some.endpoints[second]]

        await eventually(taken)
        await some.lose(second)
        answer = await read_to_the_end(call, answer)
        assert (answer.token_ids, answer.text) == (OUTPUT, text_of(OUTPUT))
        offered = some.verifiers[third].sessions[0].request
        num_told = len(offered.committed_token_ids) - len(PROMPT_IDS)
        assert tuple(offered.recorded_token_ids) == tuple(OUTPUT[num_told : num_told + 3])
        assert offered.recorded_epoch == 1


def _text_maker(pieces: Sequence[bytes]) -> Callable[[OpenSession], OutputText]:
    """Text as a real verifier makes it, of a vocabulary of these pieces in turn."""
    tokenizer = SimpleNamespace(pieces=[pieces[token_id % len(pieces)] for token_id in range(VOCABULARY_SIZE)])
    return lambda command: OutputText(cast(TextTokenizer, tokenizer), command.spec.stop.stop_strings)


HALVES = [b"\xa4", b"\xc3"]
"""Of one character: tokens of this target are odd and even by turns."""


@pytest.mark.parametrize(
    ("pieces", "stop_strings"),
    [(HALVES, ()), ([b"a", b"b"], ("abababababababababababababababc", "bab!"))],
    ids=["half a character", "the beginning of a stop string"],
)
async def test_text_that_was_held_back_at_the_loss_is_told_once(
    redis: EmbeddedStore, pieces: Sequence[bytes], stop_strings: tuple[str, ...]
) -> None:
    spec = dataclasses.replace(SPEC, stop=StopCriteria(stop_strings=stop_strings))
    expected = b"".join(pieces[token_id % 2] for token_id in OUTPUT).decode()
    async with (
        fleet(*slow_verifiers(tokens_per_round=1)) as some,
        orchestrator(some.endpoints, redis=redis.url) as client,
    ):
        for verifier in some.verifiers:
            verifier.make_text = _text_maker(pieces)
        await routed(client, 3)
        call = client.call(spec)
        answer = await read_until_tokens(call, 5)
        # Half of a character, or the beginning of a stop string, is not told.
        assert len(answer.text) < len(expected[: len(answer.token_ids)])
        await some.lose(await some.holder())
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert answer.text == expected


async def test_each_sample_goes_on_by_itself(redis: EmbeddedStore) -> None:
    spec = dataclasses.replace(SPEC, num_samples=3)
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(spec)
        samples: Samples = await read_until_all_have_tokens(call, 3, 4)
        await some.lose(await some.holder())
        async for frame in frames(call):
            samples.add(frame)
        for index, answer in enumerate(samples.answers):
            assert answer.token_ids == expected_output(PROMPT_IDS, 24, index)
            assert answer.finished is not None
            assert answer.finished.num_failovers == 1


async def test_a_drafter_is_attached_anew_at_the_next_verifier(redis: EmbeddedStore) -> None:
    drafter = FakeDrafter()
    async with (
        fleet(*slow_verifiers()) as some,
        served_drafter(drafter) as helper,
        orchestrator(some.endpoints, [helper], redis=redis.url) as client,
    ):
        await routed(client, 4)
        call = client.call(long_spec(), "helped")
        answer = await read_until_tokens(call, 2)
        before = await drafter.attachment()
        first = await some.holder()
        await some.lose(first)
        await read_until_tokens(call, len(answer.token_ids) + 2, answer)
        after = await drafter.attachment(1)
        assert (before.epoch, after.epoch) == (1, 2)
        assert after.verifier_endpoint == some.endpoints[1 - first]
        assert after.attachment_id > before.attachment_id  # a late call of the first epoch is none of the second's


# --- Faults at open ---------------------------------------------------------------------------------------------------


class FaultyVerifier(FakeVerifier):
    """Fails at every open, and counts how often it was asked."""

    num_asked = 0

    async def OpenSession(
        self, request: verifier_pb2.OpenSessionRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.OpenSessionResponse]:
        self.num_asked += 1
        raise errors.SpecdecError("no memory")
        yield


async def test_a_verifier_that_fails_at_open_is_passed_over_and_the_client_sees_nothing(redis: EmbeddedStore) -> None:
    faulty, healthy = FaultyVerifier(), FakeVerifier()
    healthy.load = Load(num_active_sessions=50, num_waiting_sessions=5, queue_wait_s=5.0)
    async with fleet(faulty, healthy) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        assert (await client.generate(SPEC)).token_ids == OUTPUT
        assert faulty.num_asked == 1
        assert [session.request.epoch for session in healthy.sessions] == [2]


async def test_a_request_on_which_a_second_verifier_fails_too_ends_with_that_error(redis: EmbeddedStore) -> None:
    verifiers = [FaultyVerifier() for _ in range(3)]
    async with fleet(*verifiers) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 4)
        error = await error_of(client.generate(SPEC))
        assert (type(error), error.message) == (errors.SpecdecError, "no memory")
        assert sorted(verifier.num_asked for verifier in verifiers) == [0, 1, 1]
    alone = FaultyVerifier()
    async with fleet(alone) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 2)
        error = await error_of(client.generate(SPEC))
        assert (type(error), error.message, alone.num_asked) == (errors.SpecdecError, "no memory", 1)


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
