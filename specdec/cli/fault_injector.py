"""Does a planned fault to a running system, waits until the system has all it had before, and notes whom it touched.

Knows how a kind of fault is done and which outputs were on their way through what it strikes; judges nothing.
"""

import asyncio
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from specdec.bench.faults.kinds import Act, FaultKind, Party
from specdec.bench.faults.proxy import Rule, Treatment
from specdec.bench.faults.records import FaultRecord
from specdec.bench.faults.schedule import PlannedFault
from specdec.bench.faults.stream import Output
from specdec.cli.fault_system import CLIENT, STORE, FaultSystem
from specdec.cli.role_process import RoleFailedError
from specdec.messages.cluster import ClusterStatus, SessionSummary

_STRIKES_WITHIN_S = 1.0
_LOST_TAIL_S = 1.0
_BACK_WITHIN_S = 60.0
_POLL_INTERVAL_S = 0.3
_HELD = {
    Act.HOLD_TO_SERVER: Rule(to_server=Treatment.HOLD),
    Act.HOLD_TO_CLIENT: Rule(to_client=Treatment.HOLD),
    Act.HOLD_BOTH: Rule(Treatment.HOLD, Treatment.HOLD),
}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a fault strikes. `source` is empty where a process is struck."""

    target: str
    source: str = ""


class FaultInjector:
    """`streaming` tells the outputs that are on their way now."""

    def __init__(self, system: FaultSystem, streaming: Callable[[], Sequence[Output]]) -> None:
        self._system = system
        self._streaming = streaming
        self._paths: dict[str, Mapping[str, SessionSummary]] = {}
        """By orchestrator, as it last told."""

    async def inject(self, fault: PlannedFault) -> FaultRecord:
        """Returns when the fault is over and what it struck is back, or did not come back in time."""
        await self._look()
        place, affected = self._choose(fault)
        began_s = time.monotonic()
        struck_until_s, error = began_s + _STRIKES_WITHIN_S, ""
        try:
            match fault.kind.act:
                case Act.KILL | Act.KILL_LOSING_ALL | Act.KILL_LOSING_TAIL:
                    began_s = await self._kill(fault.kind.act, place.target, fault.hold_s)
                    struck_until_s = began_s + _STRIKES_WITHIN_S
                case Act.STOP:
                    self._system.signal(place.target, signal.SIGSTOP)
                    await asyncio.sleep(fault.hold_s)
                    self._system.signal(place.target, signal.SIGCONT)
                case Act.DRAIN:
                    await self._drain(place.target)
                    struck_until_s = time.monotonic()
                    await self._system.start_member(place.target)
                case _:
                    await self._disturb(fault.kind.act, place, fault.hold_s)
            error = await self._until_back(fault.kind, place)
        except RoleFailedError as failure:
            error = str(failure)
        return FaultRecord(
            number=fault.number,
            kind=fault.kind,
            target=place.target,
            source=place.source,
            began_s=began_s,
            struck_until_s=struck_until_s,
            cleared_s=time.monotonic(),
            affected=affected,
            error=error,
        )

    async def _kill(self, act: Act, name: str, away_s: float) -> float:
        """When it was killed. Raises RoleFailedError where it does not start again."""
        store = self._system.store
        log_bytes = store.log_bytes() if act is Act.KILL_LOSING_TAIL else {}
        if act is Act.KILL_LOSING_TAIL:
            await asyncio.sleep(_LOST_TAIL_S)
        began_s = time.monotonic()
        await self._system.kill(name)
        if act is Act.KILL_LOSING_TAIL:
            store.lose_since(log_bytes)
        if act is Act.KILL_LOSING_ALL:
            store.lose_all()
        await asyncio.sleep(away_s)
        await self._system.start_member(name)
        return began_s

    async def _drain(self, name: str) -> None:
        if not await self._system.terminate(name):
            self._system.unexpected_ends.append(f"{name} did not end in order when told to")

    async def _disturb(self, act: Act, place: _Place, hold_s: float) -> None:
        proxy = self._system.member(place.target).proxy
        if act is Act.RESET:
            proxy.reset(place.source)
        elif act is Act.HALF_OPEN:
            proxy.vanish()
            await asyncio.sleep(hold_s)
            proxy.end_vanished()
        else:
            proxy.disturb(place.source, _HELD[act])
            await asyncio.sleep(hold_s)
            proxy.heal(place.source)

    def _choose(self, fault: PlannedFault) -> tuple[_Place, list[Output]]:
        """One of the places of that kind, of those with outputs on their way through it where there are any."""
        targets = [member.name for member in self._system.members(fault.kind.target)]
        if fault.kind.source is None:
            places = [_Place(target) for target in targets]
        else:
            places = [_Place(target, source) for target in targets for source in self._sources(fault.kind.source)]
        streaming = self._streaming()
        affected = {place: [one for one in streaming if self._passes(one, place)] for place in places}
        likely = [place for place in places if affected[place]] or places
        place = likely[int(fault.choice * len(likely))]
        return place, affected[place]

    def _sources(self, party: Party) -> list[str]:
        return [CLIENT] if party is Party.CLIENT else [member.name for member in self._system.members(party)]

    def _passes(self, output: Output, place: _Place) -> bool:
        """Whether every end of the place serves the output now. The client and the store serve all."""
        serving = {"", CLIENT, STORE, output.orchestrator}
        session = self._paths.get(output.orchestrator, {}).get(output.session_id)
        if session is not None:
            serving |= {self._system.member_at(one) for one in (session.verifier_endpoint, session.drafter_endpoint)}
        return {place.target, place.source} <= serving

    async def _look(self) -> None:
        """Where the sessions run. What an orchestrator told last holds while it does not answer."""

        async def look(name: str) -> None:
            sessions = await self._system.sessions_of(name)
            if sessions is not None:
                self._paths[name] = {session.session_id: session for session in sessions}

        await asyncio.gather(*(look(member.name) for member in self._system.members(Party.ORCHESTRATOR)))

    async def _until_back(self, kind: FaultKind, place: _Place) -> str:
        """Until every orchestrator that answers sees the whole system well; why not, when the time is up."""
        deadline_s = time.monotonic() + _BACK_WITHIN_S
        while True:
            unwell = await self._unwell(kind, place)
            if not unwell or time.monotonic() > deadline_s:
                return unwell
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _unwell(self, kind: FaultKind, place: _Place) -> str:
        for member in self._system.members(Party.ORCHESTRATOR):
            status = await self._system.status_of(member.name)
            if status is not None and not self._is_well(status, kind, place):
                return f"{member.name} does not see {place.target} well"
        return ""

    def _is_well(self, status: ClusterStatus, kind: FaultKind, place: _Place) -> bool:
        if kind.target is Party.STORE:
            return status.store_healthy
        if kind.target is Party.ORCHESTRATOR or kind.target is not kind.lane:
            return True  # what a link leads to may be away by a fault of its own lane
        endpoint = self._system.member(place.target).proxy.endpoint
        return any(one.endpoint == endpoint and one.healthy for one in status.endpoints)
