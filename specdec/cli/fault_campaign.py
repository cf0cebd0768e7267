"""A fault campaign over a running system: an undisturbed run, then the same requests while faults come, then a look at
what is left over. Knows the order of things; which fault, whom it strikes and whether promises were kept is known
elsewhere."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import psutil

from specdec.bench.faults.kinds import Party
from specdec.bench.faults.records import FaultRecord, LeftOver
from specdec.bench.faults.requests import CampaignRequest
from specdec.bench.faults.schedule import PlannedFault
from specdec.bench.faults.sessions import StreamingSessions
from specdec.bench.faults.stream import Output, Patience
from specdec.cli.client import GenerationClient
from specdec.cli.fault_injector import FaultInjector
from specdec.cli.fault_system import FaultSystem
from specdec.messages.cluster import ClusterStatus

CLIENT_TIMEOUT_S = 60.0
"""Until a system that has started takes requests."""
_OUTPUT_TIMEOUT_S = 600.0
_KNOW_SESSIONS = (Party.ORCHESTRATOR, Party.STORE)
_WRITTEN_ANEW_WITHIN_S = 3.0
"""Owners write what the store missed or forgot within about a second once it is back."""
_SETTLE_S = 60.0
"""Within this a system holds nothing of clients that are gone; its records stay for their time to live besides."""
_POLL_INTERVAL_S = 0.5


@dataclasses.dataclass(frozen=True)
class CampaignPlan:
    """After `limit_s` no further fault begins."""

    requests: Sequence[CampaignRequest]
    lanes: Mapping[Party, Sequence[PlannedFault]]
    num_sessions: int
    patience: Patience
    session_ttl_s: float
    limit_s: float


@dataclasses.dataclass
class CampaignRecording:
    """Grows while a campaign runs; whatever it holds can be reported at any time."""

    undisturbed: list[Output] = dataclasses.field(default_factory=list)
    outputs: list[Output] = dataclasses.field(default_factory=list)
    faults: list[FaultRecord] = dataclasses.field(default_factory=list)
    left_over: LeftOver = dataclasses.field(default_factory=LeftOver)
    complete: bool = False
    ended_by: str = ""


async def run_campaign(
    system: FaultSystem, plan: CampaignPlan, recording: CampaignRecording, say: Callable[[str], None]
) -> None:
    """On a system that has started; it is stopped at the end, since that is part of the test."""
    async with connected(system) as clients:
        await asyncio.gather(*(client.wait_for_model(CLIENT_TIMEOUT_S) for client in clients.values()))
        calm = StreamingSessions(plan.requests, clients, plan.num_sessions, plan.patience)
        recording.undisturbed = calm.outputs
        began_s = time.monotonic()
        await calm.ask_each_once()
        say(f"{len(plan.requests)} undisturbed outputs in {time.monotonic() - began_s:.0f} s")
        sessions = StreamingSessions(plan.requests, clients, plan.num_sessions, plan.patience)
        recording.outputs = sessions.outputs
        over = asyncio.Event()
        asking = asyncio.create_task(sessions.ask_until(over))
        try:
            await _inject_all(FaultInjector(system, lambda: sessions.streaming), plan, recording.faults, say)
            over.set()
            await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])
    left_over = await settled(system, plan.session_ttl_s)
    if left_over != LeftOver():
        say(f"left over: {left_over}")
    await system.stop()
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    recording.left_over = dataclasses.replace(
        left_over, num_processes=len(children), unexpected_ends=tuple(system.unexpected_ends)
    )


@contextlib.asynccontextmanager
async def connected(system: FaultSystem) -> AsyncIterator[dict[str, GenerationClient]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {
            member.name: await stack.enter_async_context(
                GenerationClient(member.proxy.endpoint, timeout_s=_OUTPUT_TIMEOUT_S)
            )
            for member in system.members(Party.ORCHESTRATOR)
        }


async def _inject_all(
    injector: FaultInjector, plan: CampaignPlan, faults: list[FaultRecord], say: Callable[[str], None]
) -> None:
    """Lanes beside one another, but for those of the orchestrators and the store: only these two know a session, and no
    promise is made for one that loses both."""
    knowing = asyncio.Lock()
    ends_s = time.monotonic() + plan.limit_s

    async def inject(fault: PlannedFault) -> FaultRecord:
        if fault.kind.lane not in _KNOW_SESSIONS:
            return await injector.inject(fault)
        async with knowing:
            record = await injector.inject(fault)
            if fault.kind.lane is Party.STORE:
                await asyncio.sleep(_WRITTEN_ANEW_WITHIN_S)
            else:
                await _gone_on(record, plan.patience.give_up_s)
        return record

    async def run_lane(lane: Sequence[PlannedFault]) -> None:
        for fault in lane:
            await asyncio.sleep(fault.pause_s)
            if time.monotonic() > ends_s:
                return
            record = await inject(fault)
            faults.append(record)
            where = f"{record.source} to {record.target}" if record.source else record.target
            took_s = record.cleared_s - record.began_s
            affected = f"{len(record.affected)} outputs affected, whole again after {took_s:.1f} s"
            error = f": {record.error}" if record.error else ""
            say(f"fault {len(faults):>3}: {fault.kind.name} at {where}, {affected}{error}")

    async with asyncio.TaskGroup() as group:
        for lane in plan.lanes.values():
            group.create_task(run_lane(lane))


async def _gone_on(record: FaultRecord, timeout_s: float) -> None:
    """Until every output that the fault touched streams again: until then its session has no owner, and the store alone
    knows it."""
    ends_s = time.monotonic() + timeout_s
    while True:
        if time.monotonic() > ends_s or all(_has_gone_on(one, record.cleared_s) for one in record.affected):
            return
        await asyncio.sleep(_POLL_INTERVAL_S)


def _has_gone_on(output: Output, since_s: float) -> bool:
    return output.ended_s is not None or (bool(output.arrivals) and output.arrivals[-1][0] > since_s)


async def settled(system: FaultSystem, session_ttl_s: float) -> LeftOver:
    """Of a system that no client asks any more: what is left once nothing is, or after the time that it may take."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        statuses = [await system.status_of(member.name) for member in system.members(Party.ORCHESTRATOR)]
        left_over = _open_of([status for status in statuses if status is not None])
        if left_over == LeftOver() or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    deadline_s = time.monotonic() + session_ttl_s + _SETTLE_S
    while True:
        num_keys, num_lasting = await system.store.count_keys()
        if num_keys == 0 or time.monotonic() > deadline_s:
            return dataclasses.replace(left_over, num_keys_without_expiry=num_lasting, num_keys_after_expiry=num_keys)
        await asyncio.sleep(_POLL_INTERVAL_S)


def _open_of(statuses: Sequence[ClusterStatus]) -> LeftOver:
    """The most that any orchestrator sees; each sees itself and every verifier and drafter."""
    loads = [[one.status.load for one in status.endpoints if one.status is not None] for status in statuses]
    return LeftOver(
        num_sessions=max(
            (sum(load.num_active_sessions + load.num_waiting_sessions for load in seen) for seen in loads), default=0
        ),
        num_attachments=max((sum(load.num_attachments for load in seen) for seen in loads), default=0),
        kv_bytes=max((sum(load.kv_used_bytes for load in seen) for seen in loads), default=0),
    )
