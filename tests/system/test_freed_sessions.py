"""What a session leaves in the orchestrator's memory when it has ended."""

import gc
from collections.abc import Iterator

import pytest

from orchestrator.session_runner import SessionRunner
from tests.system.fakes import FakeVerifier
from tests.system.orchestrator_harness import (
    SLOW_S,
    SPEC,
    Client,
    eventually,
    long_spec,
    nothing_running,
    read_until_tokens,
)

pytestmark = pytest.mark.system


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def no_runner_is_left() -> bool:
    return not any(isinstance(thing, SessionRunner) for thing in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
async def test_a_finished_session_is_freed_without_waiting_for_the_collector(client: Client) -> None:
    await client.generate(SPEC)
    await eventually(no_runner_is_left)


@pytest.mark.usefixtures("no_collector")
async def test_a_session_whose_client_left_is_freed_without_waiting_for_the_collector(
    client: Client, verifier: FakeVerifier
) -> None:
    verifier.round_s = SLOW_S
    call = client.call(long_spec())
    await read_until_tokens(call, 4)
    call.cancel()
    await nothing_running(client)
    await eventually(no_runner_is_left)
