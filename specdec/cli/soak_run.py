"""A soak of a running system: clients that come, go and cancel at random, roles that are killed now and then, and what
every process holds meanwhile. The last of each role is struck; all others live from beginning to end."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from specdec.bench.faults.growth import Sample
from specdec.bench.faults.kinds import Party
from specdec.bench.faults.mixed_load import Ending, SoakRequest, draw_request
from specdec.bench.faults.process_usage import take_sample
from specdec.bench.faults.records import LeftOver
from specdec.bench.faults.stream import RESUMABLE_REASONS, SILENT
from specdec.cli.client import GenerationClient
from specdec.cli.fault_campaign import CLIENT_TIMEOUT_S, connected, settled
from specdec.cli.fault_system import CLIENT, FaultSystem
from specdec.cli.role_process import RoleFailedError
from specdec.errors import PeerUnavailableError, SpecdecError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished
from specdec.params import FinishReason

_SAMPLE_INTERVAL_S = 10.0
_FAULT_INTERVAL_S = 45.0
_STOPPED_S = 5.0
_AWAY_S = 1.0
_SILENCE_S = 15.0
_PAUSE_AFTER_ERROR_S = 0.3
_STRUCK_PARTIES = (Party.VERIFIER, Party.ORCHESTRATOR, Party.DRAFTER)
FINISHED, LEFT, CANCELLED = "finished", "left by its client", "cancelled"


@dataclasses.dataclass(frozen=True)
class SoakPlan:
    duration_s: float
    num_clients: int
    seed: int
    session_ttl_s: float


@dataclasses.dataclass
class SoakRecording:
    """Grows while a soak runs. `endings` are requests by how they ended, with the error's reason where it was one;
    `restarts` are those of each process that was struck; `samples` are by process, of those that never were."""

    endings: Counter[str] = dataclasses.field(default_factory=Counter)
    defects: list[str] = dataclasses.field(default_factory=list)
    restarts: Counter[str] = dataclasses.field(default_factory=Counter)
    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)
    left_over: LeftOver = dataclasses.field(default_factory=LeftOver)
    complete: bool = False
    ended_by: str = ""


async def run_soak(system: FaultSystem, plan: SoakPlan, recording: SoakRecording, say: Callable[[str], None]) -> None:
    """On a system that has started; it is stopped at the end."""
    struck = [system.members(party)[-1].name for party in _STRUCK_PARTIES]
    async with connected(system) as clients:
        await asyncio.gather(*(client.wait_for_model(CLIENT_TIMEOUT_S) for client in clients.values()))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(plan.num_clients):
                chance = random.Random(f"{plan.seed} {number}")  # noqa: S311 - a load, not a secret
                group.create_task(_ask(clients, number, chance, recording, over))
            group.create_task(_strike(system, struck, plan.seed, recording, over))
            group.create_task(_sample(system, struck, recording, over, say))
            await asyncio.sleep(plan.duration_s)
            over.set()
    recording.left_over = await settled(system, plan.session_ttl_s)
    await system.stop()
    ends = tuple(system.unexpected_ends)
    recording.left_over = dataclasses.replace(recording.left_over, unexpected_ends=ends)


async def _ask(
    clients: Mapping[str, GenerationClient],
    number: int,
    chance: random.Random,
    recording: SoakRecording,
    over: asyncio.Event,
) -> None:
    """One request after the other, at the replicas in turn. What broke is not resumed: the next request comes."""
    for name in itertools.islice(itertools.cycle(clients), number % len(clients), None):
        if over.is_set():
            return
        try:
            ending = await _request(clients[name], draw_request(chance))
        except SpecdecError as error:
            ending = error.reason
            if error.reason not in RESUMABLE_REASONS:
                recording.defects.append(f"{error.reason}: {error.message}")
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        except TimeoutError:
            ending = SILENT
        recording.endings[ending] += 1


async def _request(client: GenerationClient, request: SoakRequest) -> str:
    """How it ended. Raises SpecdecError and TimeoutError where it broke."""
    session_id = uuid.uuid4().hex
    num_tokens = num_finished = 0
    async with contextlib.aclosing(client.generate(request.spec, session_id)) as events:
        async for event in _in_time(events):
            num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            if isinstance(event, Finished):
                num_finished += 1
                if event.reason is FinishReason.CANCELLED:
                    return CANCELLED
            if num_finished == request.spec.num_samples:
                return FINISHED
            if num_tokens > request.after_tokens and request.ending is Ending.DISCONNECT:
                return LEFT
            if num_tokens > request.after_tokens and request.ending is Ending.CANCEL:
                await client.cancel(SessionId(session_id))
                request = dataclasses.replace(request, ending=Ending.RECEIVE)
    raise PeerUnavailableError("the stream ended without its last frame")


async def _in_time(events: AsyncIterator[object]) -> AsyncIterator[object]:
    """Raises TimeoutError where nothing comes for long."""
    while True:
        async with asyncio.timeout(_SILENCE_S):
            event = await anext(events, None)
        if event is None:
            return
        yield event


async def _strike(
    system: FaultSystem, struck: list[str], seed: int, recording: SoakRecording, over: asyncio.Event
) -> None:
    """Kills, stops and drains; a role that does not come back is told at the end as one that ended by itself."""
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    while not await _is_over(over, _FAULT_INTERVAL_S):
        name = chance.choice(struck)
        try:
            match chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)):
                case signal.SIGSTOP:
                    system.signal(name, signal.SIGSTOP)
                    await asyncio.sleep(_STOPPED_S)
                    system.signal(name, signal.SIGCONT)
                    continue
                case signal.SIGTERM:
                    if not await system.terminate(name):
                        system.unexpected_ends.append(f"{name} did not end in order when told to")
                case _:
                    await system.kill(name)
            await asyncio.sleep(_AWAY_S)
            await system.start_member(name)
            recording.restarts[name] += 1
        except RoleFailedError as error:
            system.unexpected_ends.append(str(error))


async def _sample(
    system: FaultSystem, struck: list[str], recording: SoakRecording, over: asyncio.Event, say: Callable[[str], None]
) -> None:
    began_s = time.monotonic()
    while not await _is_over(over, _SAMPLE_INTERVAL_S):
        pids = {name: pid for name, pid in system.pids.items() if name not in struck}
        for name, pid in {**pids, CLIENT: os.getpid()}.items():
            sample = await asyncio.to_thread(take_sample, pid)
            if sample is not None:
                recording.samples.setdefault(name, []).append(sample)
        if len(recording.samples[CLIENT]) % 6 == 0:
            say(f"{time.monotonic() - began_s:.0f} s: {dict(recording.endings)}")


async def _is_over(over: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await over.wait()
    return over.is_set()
