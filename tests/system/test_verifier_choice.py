"""Which verifier gets a session, over real gRPC: the one that has its prompt, and not the one that keeps failing."""

import dataclasses

from orchestrator.breaker import NUM_FAILURES_TO_OPEN
from orchestrator.embedded_store import EmbeddedStore
from specdec import errors
from specdec.v1 import admin_pb2
from tests.system.fakes import FakeVerifier, served_verifier
from tests.system.orchestrator_harness import SLOW_S, SPEC, long_spec, orchestrator, read_until_tokens, routed

SYSTEMS = [f"You are clerk number {number}. " + "Be brief and polite. " * 100 for number in range(6)]


async def test_prompts_that_begin_alike_meet_at_one_verifier(
    redis: EmbeddedStore,
) -> None:
    one, other = FakeVerifier(), FakeVerifier()
    async with (
        served_verifier(one) as first,
        served_verifier(other) as second,
        orchestrator([first, second], redis=redis.url) as client,
    ):
        await routed(client, 3)
        for question in ("Who was Sappho?", "And Catullus?", "And Horace?"):
            for system in SYSTEMS:
                await client.generate(dataclasses.replace(SPEC, prompt=f"{system}{question}"))
        clerks = [{str(s.request.spec.prompt)[:25] for s in verifier.sessions} for verifier in (one, other)]
        assert clerks[0] & clerks[1] == set()
        assert len(clerks[0] | clerks[1]) == len(SYSTEMS)
        assert len(one.sessions) + len(other.sessions) == 3 * len(SYSTEMS)


async def test_a_verifier_that_loses_one_session_after_the_other_gets_no_more_for_a_while(redis: EmbeddedStore) -> None:
    failing, sound = FakeVerifier(round_s=SLOW_S), FakeVerifier(round_s=SLOW_S)
    async with (
        served_verifier(failing) as bad,
        served_verifier(sound) as good,
        orchestrator([bad, good], redis=redis.url) as client,
    ):
        await routed(client, 3)
        calls = [client.call(long_spec(), f"s{number}") for number in range(2 * NUM_FAILURES_TO_OPEN)]
        answers = [await read_until_tokens(call, 2) for call in calls]
        for number in range(NUM_FAILURES_TO_OPEN):
            (await failing.session(number)).injected.put_nowait(errors.SpecdecError("a bug of this verifier"))
        for call, answer in zip(calls, answers, strict=True):
            await read_until_tokens(call, len(answer.token_ids) + 20, answer)
        (told,) = [one for one in (await client.cluster()).endpoints if one.endpoint == bad]
        assert told.circuit in (admin_pb2.CIRCUIT_STATE_OPEN, admin_pb2.CIRCUIT_STATE_HALF_OPEN)
        assert told.last_error == "INTERNAL"
        assert len(failing.sessions) == NUM_FAILURES_TO_OPEN
        for call in calls:
            call.cancel()
