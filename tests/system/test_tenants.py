"""Tenants over real gRPC: told with every session, kept with its record, and asked for again by Resume."""

import dataclasses

import pytest

from orchestrator.record import RecordState
from orchestrator.session_store import SessionStore
from specdec import errors
from specdec.params import GenerationSpec, StopCriteria
from tests.system.fakes import (
    FakeVerifier,
    expected_output,
    tokenise,
)
from tests.system.orchestrator_harness import (
    PROMPT,
    SLOW_S,
    SPEC,
    Client,
    drained,
    error_of,
    read_until_all_have_tokens,
    record_in,
)

pytestmark = pytest.mark.system


async def test_a_tenant_is_told_to_the_verifier_and_kept_with_the_session(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    await client.generate(SPEC, "named", "team-a")
    await client.generate(SPEC, "unnamed")
    assert [session.request.tenant for session in verifier.sessions] == ["team-a", ""]
    assert (await record_in(store, "named", RecordState.FINISHED)).tenant == "team-a"
    assert (await record_in(store, "unnamed", RecordState.FINISHED)).tenant == ""


async def test_a_resume_under_another_tenant_finds_nothing_and_disturbs_nobody(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=60)), "mine", "team-a")
    samples = await read_until_all_have_tokens(call, 1)
    for tenant in ("", "team-b"):
        assert isinstance(await error_of(client.resume("mine", [], tenant=tenant)), errors.UnknownSessionError)
    await drained(call)
    await record_in(store, "mine", RecordState.FINISHED)
    for tenant in ("", "team-b"):
        assert isinstance(await error_of(client.resume("mine", [], tenant=tenant)), errors.UnknownSessionError)
    resumed = await client.resume("mine", samples.answers[0].token_ids, tenant="team-a")
    assert resumed.token_ids == expected_output(tokenise(PROMPT), 60)
    assert verifier.sessions[-1].request.tenant == "team-a"


async def test_a_cancel_under_another_tenant_finds_nothing_and_disturbs_nobody(
    client: Client, verifier: FakeVerifier, store: SessionStore
) -> None:
    verifier.round_s = SLOW_S
    for name, is_running in (("running", True), ("over", False)):
        call = client.call(dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=20)), name, "team-a")
        await read_until_all_have_tokens(call, 1)
        if not is_running:
            await drained(call)
        for tenant in ("", "team-b"):
            assert not await client.cancel(name, tenant)
        if is_running:
            await drained(call)
        await record_in(store, name, RecordState.FINISHED)
        assert await client.cancel(name, "team-a")


@pytest.mark.parametrize("tenant", ["with space", "x" * 65, "a/b", "a.b"])
async def test_a_tenant_with_a_name_that_could_harm_a_key_is_refused(client: Client, tenant: str) -> None:
    told = await error_of(client.generate(GenerationSpec(prompt="x"), tenant=tenant))
    assert isinstance(told, errors.InvalidParameterError)
    assert told.metadata == {"field": "tenant"}
