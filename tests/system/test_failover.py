"""A session loses its verifier at every moment there is, and its client sees no more than a pause."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.messages import Load, OpenSession, PromptLogprobs
from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from specdec.params import StopCriteria
from specdec.v1 import admin_pb2, verifier_pb2
from tests.system.fakes import (
    VOCABULARY_SIZE,
    Context,
    FakeDrafter,
    FakeVerifier,
    expected_logprobs,
    expected_output,
    served_drafter,
    text_of,
)
from tests.system.fleet import PROMPT_IDS, STANDS_STILL_S, fleet, read_to_the_end, slow_verifiers
from tests.system.orchestrator_harness import (
    OUTPUT,
    SPEC,
    Answer,
    Samples,
    error_of,
    eventually,
    frames,
    long_spec,
    orchestrator,
    read_until_all_have_tokens,
    read_until_tokens,
    record_in,
    routed,
)

pytestmark = pytest.mark.system


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
