"""Verifiers that are killed, stand still or are told to go, as real processes of a synthetic target, while sessions
stream: every token is as if nothing had happened."""

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.bench.faults.kinds import Party
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_view import ClusterView
from specdec.cli.fault_system import FaultSystem, FaultSystemOptions
from specdec.messages import Delta, Finished
from specdec.messages.cluster import Role
from specdec.params import GenerationSpec, SamplingParams, StopCriteria

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(360)]

NUM_SESSIONS = 8
NUM_TOKENS = 60
DEADLINE_S = 120.0
STRIKE_AT = 10
"""Output tokens of each session when the fault comes."""


@dataclasses.dataclass
class Output:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finished: Finished | None = None

    @property
    def num_failovers(self) -> int:
        return self.finished.num_failovers if self.finished is not None else 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultSystem]:
    options = FaultSystemOptions(
        model="synthetic:seed=5,forward_ms=50",
        draft_model="synthetic:seed=5,acceptance=0.6",
        log_folder=Path(tmp_path_factory.mktemp("logs")),
        num_verifiers=2,
        num_drafters=1,
        num_orchestrators=1,
    )
    async with FaultSystem(options, ClusterView()) as system:
        yield system


def _spec(number: int) -> GenerationSpec:
    """Every other one samples; some may end in a word that begins like many do, so that text is held back."""
    sampling = (
        SamplingParams(temperature=0.0) if number % 2 else SamplingParams(temperature=0.9, top_p=0.9, seed=number)
    )
    stop_strings = () if number % 4 < 2 else (" and never this", "the end of all words here")
    stop = StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True, stop_strings=stop_strings)
    return GenerationSpec(f"request {number}", sampling=sampling, stop=stop)


class Underway:
    """Is set once every session has some output."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self.reached = asyncio.Event()

    def note(self, number: int, num_tokens: int) -> None:
        if num_tokens >= STRIKE_AT:
            self._numbers.add(number)
        if len(self._numbers) == NUM_SESSIONS:
            self.reached.set()


async def _read(client: GenerationClient, number: int, underway: Underway) -> Output:
    output = Output()
    async for event in client.generate(_spec(number)):
        if isinstance(event, Delta):
            output.token_ids += event.token_ids
            output.text += event.text
            underway.note(number, len(output.token_ids))
        elif isinstance(event, Finished):
            output.text += event.text
            output.finished = event
    return output


async def _outputs(system: FaultSystem, strike: Callable[[], Awaitable[object]] | None = None) -> list[Output]:
    (orchestrator,) = system.members(Party.ORCHESTRATOR)
    underway = Underway()
    async with asyncio.timeout(DEADLINE_S), GenerationClient(orchestrator.direct_endpoint) as client:
        reading = asyncio.gather(*(_read(client, number, underway) for number in range(NUM_SESSIONS)))
        await underway.reached.wait()
        if strike is not None:
            await strike()
        return await reading


async def _both_serve(system: FaultSystem) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await system.status_of("orchestrator-0")
            views = status.endpoints if status is not None else ()
            if sum(one.healthy for one in views if one.role is Role.VERIFIER) == 2:
                return
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(system: FaultSystem) -> list[Output]:
    await _both_serve(system)
    outputs = await _outputs(system)
    assert all(len(output.token_ids) == NUM_TOKENS for output in outputs)
    assert all(output.num_failovers == 0 for output in outputs)
    return outputs


def _say_the_same(outputs: list[Output], undisturbed: list[Output]) -> None:
    assert [output.token_ids for output in outputs] == [output.token_ids for output in undisturbed]
    assert [output.text for output in outputs] == [output.text for output in undisturbed]
    assert any(output.num_failovers > 0 for output in outputs)
    assert not any(output.finished is None or output.finished.numerics_changed for output in outputs)


async def test_a_killed_verifier_changes_no_token(system: FaultSystem, undisturbed: list[Output]) -> None:
    await _both_serve(system)
    _say_the_same(await _outputs(system, lambda: system.kill("verifier-0")), undisturbed)
    await system.start_member("verifier-0")


async def test_a_verifier_that_stands_still_changes_no_token(system: FaultSystem, undisturbed: list[Output]) -> None:
    async def stop() -> None:
        system.signal("verifier-1", signal.SIGSTOP)

    await _both_serve(system)
    _say_the_same(await _outputs(system, stop), undisturbed)
    system.signal("verifier-1", signal.SIGCONT)


async def test_a_verifier_that_is_told_to_go_changes_no_token(system: FaultSystem, undisturbed: list[Output]) -> None:
    await _both_serve(system)
    _say_the_same(await _outputs(system, lambda: system.terminate("verifier-0")), undisturbed)
    await system.start_member("verifier-0")
