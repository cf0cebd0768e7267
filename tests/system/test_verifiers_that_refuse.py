"""What one verifier refuses a session for, once another has taken it, is that verifier's own limit: the session goes on
elsewhere, and its client hears nothing of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from orchestrator.embedded_store import EmbeddedStore
from specdec import errors
from specdec.errors import SpecdecError
from specdec.v1 import verifier_pb2
from tests.system.fakes import Context, FakeVerifier
from tests.system.fleet import fleet, read_to_the_end, slow_verifiers
from tests.system.orchestrator_harness import (
    DEADLINE_S,
    OUTPUT,
    SLOW_S,
    SPEC,
    error_of,
    orchestrator,
    read_until_tokens,
    routed,
)

pytestmark = pytest.mark.system

NOT_THE_CLIENTS_FAULT = [
    errors.OverloadedError("too many sessions wait", retry_after_s=0.1),
    errors.PermissionDeniedError("no role"),
    errors.UnauthenticatedError("no certificate"),
    errors.SlowReaderError("nothing was read"),
    errors.MessageTooLargeError("too large"),
    errors.MalformedRequestError("not understood"),
    errors.NotOfferedError("another service"),
    errors.UnknownModelError("another model"),
    errors.DeadlineError("a proxy's deadline"),
    SpecdecError("the round failed"),
]
ITS_OWN_LIMITS = [
    errors.InvalidParameterError("max_new_tokens: the key-value cache leaves room for less"),
    errors.PromptTooLongError("the key-value cache takes less"),
    errors.SessionExistsError("this owner has the session open already"),
    *NOT_THE_CLIENTS_FAULT,
]


class RefusingVerifier(FakeVerifier):
    """Tells when it has refused a session."""

    def __init__(self) -> None:
        super().__init__(round_s=SLOW_S)
        self.has_refused = asyncio.Event()

    async def OpenSession(
        self, request: verifier_pb2.OpenSessionRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.OpenSessionResponse]:
        if self.refusal is not None:
            self.has_refused.set()
        async for response in super().OpenSession(request, context):
            yield response


def _name(error: SpecdecError) -> str:
    return error.reason


@pytest.mark.parametrize("error", NOT_THE_CLIENTS_FAULT, ids=_name)
async def test_a_stream_that_a_verifier_ends_with_an_error_goes_on_elsewhere(
    redis: EmbeddedStore, error: SpecdecError
) -> None:
    async with fleet(*slow_verifiers()) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 6)
        some.verifiers[await some.holder()].sessions[0].injected.put_nowait(error)
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT
        assert answer.finished is not None
        assert answer.finished.num_failovers == 1


@pytest.mark.parametrize("error", ITS_OWN_LIMITS, ids=_name)
async def test_a_session_that_lost_its_verifier_looks_on_where_another_refuses_it(
    redis: EmbeddedStore, error: SpecdecError
) -> None:
    verifiers = [RefusingVerifier() for _ in range(3)]
    async with fleet(*verifiers) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 4)
        call = client.call(SPEC)
        answer = await read_until_tokens(call, 6)
        first = await some.holder()
        others = [verifier for number, verifier in enumerate(verifiers) if number != first]
        for verifier in others:
            verifier.refusal = error
        await some.lose(first)
        async with asyncio.timeout(DEADLINE_S):
            for verifier in others:
                await verifier.has_refused.wait()
        others[1].refusal = None
        answer = await read_to_the_end(call, answer)
        assert answer.token_ids == OUTPUT


async def test_where_every_verifier_refuses_it_the_client_is_told_that_it_can_be_resumed(redis: EmbeddedStore) -> None:
    verifiers = [RefusingVerifier() for _ in range(2)]
    async with (
        fleet(*verifiers) as some,
        orchestrator(some.endpoints, redis=redis.url, failover_timeout_s=0.5) as client,
    ):
        await routed(client, 3)
        call = client.call(SPEC, "refused")
        answer = await read_until_tokens(call, 6)
        first = await some.holder()
        verifiers[1 - first].refusal = errors.InvalidParameterError("max_new_tokens")
        await some.lose(first)
        told = await error_of(read_to_the_end(call, answer))
        assert isinstance(told, errors.VerifierLostError)
        assert told.metadata["session_id"] == "refused"
        verifiers[1 - first].refusal = None
        assert (await client.resume("refused", answer.token_ids)).token_ids == OUTPUT


@pytest.mark.parametrize(
    "error", [errors.PermissionDeniedError("no role"), errors.UnknownModelError("another")], ids=_name
)
async def test_a_new_session_is_not_refused_for_what_its_orchestrator_may_not_or_got_wrong(
    redis: EmbeddedStore, error: SpecdecError
) -> None:
    verifiers = [RefusingVerifier() for _ in range(2)]
    async with fleet(*verifiers) as some, orchestrator(some.endpoints, redis=redis.url) as client:
        await routed(client, 3)
        verifiers[0].refusal = error
        assert (await client.generate(SPEC)).token_ids == OUTPUT
        assert (await client.generate(SPEC)).token_ids == OUTPUT
        verifiers[1].refusal = error
        assert isinstance(await error_of(client.generate(SPEC)), errors.NoVerifierError | errors.UnknownModelError)
