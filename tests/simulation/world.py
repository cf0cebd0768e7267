"""One cluster, its clients, and a schedule carried out on them. `run_schedule` raises what was seen to be wrong."""

import asyncio
import random
import traceback
from collections.abc import Callable
from typing import Any

import drafter_service.main
import orchestrator.main
import verifier_service.main
from specdec.config import WireSettings
from tests.simulation import roles
from tests.simulation.client import SimClient
from tests.simulation.faults import Fault, Kind, Schedule
from tests.simulation.monitors import Monitors
from tests.simulation.network import LATENCY_S
from tests.simulation.rpc import RpcNetwork, SimChannel
from tests.simulation.store import RedisServer
from tests.simulation.store_client import STORE_HOST, StoreLink
from tests.simulation.virtual_time import Process, VirtualLoop

START_S = 0.3
QUIET_LIMIT_S = 120.0
"""All clients are done so long after the last fault was mended."""
DRAIN_LIMIT_S = 60.0
"""Keepalive, leases and what is kept for the next owner end within this time."""
LOOK_S = 0.5
MAX_NOTES = 150
SESSION_TASKS = (
    "session ",
    "draft ",
    "serve /specdec.v1.VerifierService/OpenSession",
    "serve /specdec.v1.GenerationService",
    "call /specdec.v1.VerifierService/OpenSession",
)


class ViolationError(AssertionError):
    """What was wrong, the schedule, and what happened when."""


class World:
    def __init__(self, loop: VirtualLoop, schedule: Schedule) -> None:
        self.loop, self.schedule = loop, schedule
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.stopping: dict[Process, asyncio.Event] = {}
        self.network = RpcNetwork(loop, self.fail)
        self.monitors = Monitors(self)
        self.store = RedisServer(loop, self.monitors.on_script)
        self.store_link = StoreLink(self.network, self.store)
        self.processes: dict[str, Process] = {}
        self.all_processes: list[Process] = []
        self.clients: dict[str, SimClient] = {}
        self._cancelling: set[str] = set()
        self._channels: dict[tuple[Process, int], SimChannel] = {}
        self.endpoints = {
            f"{role}{index}": f"127.0.0.1:{base + index}"
            for role, base, number in (
                ("verifier", 7100, schedule.num_verifiers),
                ("drafter", 7200, schedule.num_drafters),
                ("orchestrator", 7300, schedule.num_orchestrators),
            )
            for index in range(number)
        }
        self.network.hosts = {endpoint: name for name, endpoint in self.endpoints.items()}

    # --- What happens ------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self.loop.is_over:
            return
        self.notes.append(f"{self.loop.now - 1000.0:8.3f}  {text}")

    def fail(self, message: str) -> None:
        """Something is wrong; the run ends at the next fault, or at its end."""
        if self.loop.is_over:
            return
        self.note(f"VIOLATION {message}")
        self.violations.append(message)

    def channel(self, client: Process, orchestrator: int) -> SimChannel:
        """Of a client to one of the orchestrators, counted on and on."""
        number = orchestrator % self.schedule.num_orchestrators
        key = (client, number)
        if key not in self._channels:
            endpoint = self.endpoints[f"orchestrator{number}"]
            self._channels[key] = SimChannel(self.network, endpoint, WireSettings())
        return self._channels[key]

    def is_cancelling(self, session_id: str) -> bool:
        return session_id in self._cancelling

    async def run(self) -> None:
        for name in self.endpoints:
            self.start(name)
        await asyncio.sleep(START_S)
        if self.violations:
            return
        tasks = []
        for index, request in enumerate(self.schedule.requests):
            process = self._new_process(f"client{index}")
            self.monitors.expect(process.name, request)
            process.context().run(self._new_client, process, request, index)
            tasks.append(process.spawn(self.clients[process.name].run()))
        for fault in self.schedule.faults:
            await asyncio.sleep(fault.after_s)
            self.note(f"-- {fault}")
            self._inflict(fault)
            if self.violations:
                return
        outages_s = [fault.for_s for fault in self.schedule.faults if fault.kind is not Kind.CLOCK_JUMP]
        await asyncio.sleep(max(outages_s, default=0.0))
        self._mend_all()
        _, stuck = await asyncio.wait(tasks, timeout=QUIET_LIMIT_S)
        for name, client in self.clients.items():
            self._judge(name, client)
        if stuck or self.violations:
            return
        await self._drain()

    async def _drain(self) -> None:
        """In the end nothing is left: no session anywhere, no task of one, no key without an end."""
        give_up_at = self.loop.now + DRAIN_LIMIT_S
        while left := [*self.monitors.left(), *self._tasks_left()]:
            if self.loop.now >= give_up_at:
                for one in left:
                    self.fail(one)
                return
            await asyncio.sleep(LOOK_S)
        for key in self.store.live_keys():
            if key not in self.store.expires_at_ms and b"{" in key:
                self.fail(f"{key.decode()} stays in the store for ever")

    def _tasks_left(self) -> list[str]:
        return [
            f"{process.name} still has a task: {task.get_name()}"
            for process in self.processes.values()
            for task in process.tasks
            if task.get_name().startswith(SESSION_TASKS)
        ]

    def _judge(self, name: str, client: SimClient) -> None:
        allowed = {"finished", "left", "cancelled"}
        if self.schedule.disturbs_store or name not in self.monitors.was_opened:
            allowed |= {"unknown", "mismatch"}
        if client.outcome not in allowed:
            told = client.outcome or f"not done after {QUIET_LIMIT_S:.0f} s without faults"
            self.fail(f"{name} is {told}, with {len(client.received)} tokens")

    # --- Processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        process = self._new_process(name)
        endpoint = self.endpoints[name]
        if name.startswith("verifier"):
            serving = verifier_service.main.serve(roles.verifier_settings(endpoint, "same"))
        elif name.startswith("drafter"):
            serving = drafter_service.main.serve(roles.drafter_settings(endpoint))
        else:
            verifiers = tuple(end for host, end in self.endpoints.items() if host.startswith("verifier"))
            drafters = tuple(end for host, end in self.endpoints.items() if host.startswith("drafter"))
            settings = roles.orchestrator_settings(endpoint, verifiers, drafters, self.schedule.strict)
            serving = orchestrator.main.serve(settings)
        process.spawn(serving, f"main {name}").add_done_callback(lambda task: self._on_exit(process, task))

    def _on_exit(self, process: Process, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fail(f"{process.name} ended with {task.exception()!r}")
        if not self.loop.is_over:
            process.kill()
            self.network.look()

    def _new_process(self, name: str) -> Process:
        process = Process(name, self.loop)
        self.processes[name] = process
        self.all_processes.append(process)
        return process

    def _new_client(self, process: Process, request: Any, index: int) -> None:
        self.clients[process.name] = SimClient(self, process, request, index)

    def _restart(self, name: str) -> None:
        if self.processes[name].is_dead:
            self.note(f"{name} is started anew")
            self.start(name)

    # --- Faults ------------------------------------------------------------------------------------------------------

    def _inflict(self, fault: Fault) -> None:
        who, other, network = fault.who, fault.other, self.network
        process = self.processes.get(who)
        match fault.kind:
            case Kind.KILL if process is not None and not process.is_dead:
                process.kill()
                network.look()
                self._later(fault.for_s, lambda: self._restart(who))
            case Kind.PAUSE if process is not None and not process.is_dead:
                process.pause()
                network.look()
                self._later(fault.for_s, lambda: self._go_on(process))
            case Kind.TERMINATE if process in self.stopping and not process.is_dead:
                self.stopping[process].set()
                self._later(fault.for_s, lambda: self._restart(who))
            case Kind.CUT | Kind.CUT_ONE_WAY:
                ways = [(who, other)] + ([(other, who)] if fault.kind is Kind.CUT else [])
                for source, target in ways:
                    network.set_cut(source, target, is_cut=True)
                    self._later(fault.for_s, lambda s=source, t=target: network.set_cut(s, t, is_cut=False))
            case Kind.SLOW:
                network.link(who, other).latency_s = LATENCY_S + fault.for_s
            case Kind.RESET:
                network.reset(who, other)
            case Kind.DUPLICATE:
                network.duplicates_left += 3
            case Kind.STORE_AWAY:
                self.store_link.is_away = True
                self._later(fault.for_s, self._store_is_back)
            case Kind.STORE_SAVES:
                self.store.save()
            case Kind.STORE_ROLLS_BACK:
                self.store.roll_back()
            case Kind.STORE_EMPTY:
                self.store.flush()
            case Kind.STORE_REPLIES_LOST:
                self.store_link.replies_to_lose += 2
            case Kind.CLOCK_JUMP if who == STORE_HOST:
                self.store.clock_offset_s += fault.for_s
            case Kind.CLOCK_JUMP if process is not None:
                process.wall_clock_offset_s += fault.for_s
            case Kind.CLIENT_RECONNECTS if who in self.clients:
                process.context().run(self.clients[who].reconnect)
            case Kind.CLIENT_FORGETS if who in self.clients:
                self.clients[who].forget()
            case Kind.CLIENT_LEAVES if who in self.clients:
                process.context().run(self.clients[who].leave)
            case Kind.CLIENT_CANCELS if who in self.clients:
                self._cancelling.add(who)
                process.spawn(self.clients[who].cancel())

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.loop.call_later(seconds, act)

    def _go_on(self, process: Process) -> None:
        if process.is_paused:
            self.note(f"{process.name} goes on")
            process.go_on()
            self.network.look()

    def _store_is_back(self) -> None:
        self.store_link.is_away = False

    def _mend_all(self) -> None:
        self.note("-- everything is mended")
        for process in list(self.processes.values()):
            self._go_on(process)
        for name in self.endpoints:
            self._restart(name)
        self.store_link.is_away, self.store_link.replies_to_lose = False, 0
        self.network.heal()


def run_schedule(schedule: Schedule, seed: int = 0) -> World:
    """Raises ViolationError. Within `roles.installed` alone."""
    state = random.getstate()
    random.seed(seed)
    loop = VirtualLoop()
    world = World(loop, schedule)
    loop.world = world
    loop.set_exception_handler(lambda _, context: world.fail(_unhandled(context)))
    try:
        loop.run_until_complete(world.run())
    finally:
        _end(loop, world)
        random.setstate(state)
    if world.violations:
        raise ViolationError("\n".join(["", *world.violations, "", str(schedule), "", *world.notes[-MAX_NOTES:]]))
    return world


def _unhandled(context: dict[str, Any]) -> str:
    error = context.get("exception")
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    return f"unhandled: {context['message']}\n{trace}"


def _end(loop: VirtualLoop, world: World) -> None:
    """Ends every task, those of the dead too, so that none is found by the collector."""
    loop.is_over = True
    loop.set_exception_handler(lambda _, context: None)
    for process in world.all_processes:
        loop.release(process.parked)
    for _ in range(20):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=30.0))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
