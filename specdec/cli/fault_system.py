"""A whole system to be struck: real processes of every role, a store that keeps its data on disk, and a fault proxy
before each of them. Knows how each is started, killed and started again; refuses to know why."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.bench.faults.kinds import Party
from specdec.bench.faults.proxy import FaultProxy
from specdec.cli.access import Access
from specdec.cli.admin_client import AdminClient
from specdec.cli.cluster_options import LOOPBACK, role_command_line
from specdec.cli.cluster_view import ClusterView
from specdec.cli.connection_owner import owner_of_port
from specdec.cli.processes import LISTENING, SERVING
from specdec.cli.role_process import RoleCommand, RoleProcess
from specdec.cli.store_process import StoreProcess
from specdec.config import format_endpoint
from specdec.errors import SpecdecError
from specdec.local_store import HOST
from specdec.messages.cluster import ClusterStatus, SessionSummary

STORE = "store"
CLIENT = "client"
_START_TIMEOUT_S = 600.0
_STOP_GRACE_S = 40.0
_ASK_TIMEOUT_S = 2.0
_PAGE_SIZE = 1000
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Many processes share few cores here."""


@dataclasses.dataclass(frozen=True)
class FaultSystemOptions:
    """`arguments` go to every process of a role as they are. Without a draft model drafters look up in the text."""

    model: str
    draft_model: str
    log_folder: Path
    num_verifiers: int = 3
    num_drafters: int = 3
    num_orchestrators: int = 2
    verifier_arguments: Sequence[str] = ()
    drafter_arguments: Sequence[str] = ()
    orchestrator_arguments: Sequence[str] = ()


class Member:
    """One process of the system, with the proxy that stands before it all the time."""

    def __init__(self, name: str, party: Party, proxy: FaultProxy) -> None:
        self.name = name
        self.party = party
        self.proxy = proxy
        self.process: RoleProcess | None = None
        self.direct_endpoint = ""
        self.metrics_endpoint = ""
        self.expected_to_end = False

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        running = self.process is not None and self.process.exit_code is None
        return self.process.pid if running and self.process is not None else None


class FaultSystem:
    """`async with FaultSystem(options, view) as system:` starts everything and leaves nothing behind."""

    def __init__(self, options: FaultSystemOptions, view: ClusterView) -> None:
        self.options = options
        self.unexpected_ends: list[str] = []
        self._view = view
        self._members = {
            name: Member(name, party, FaultProxy(self._name_client))
            for party, number in (
                (Party.VERIFIER, options.num_verifiers),
                (Party.DRAFTER, options.num_drafters),
                (Party.ORCHESTRATOR, options.num_orchestrators),
            )
            for name in (f"{party.value}-{index}" for index in range(number))
        }
        self._members[STORE] = Member(STORE, Party.STORE, FaultProxy(self._name_client))
        self.store = StoreProcess(options.log_folder, options.log_folder / "store.log", view.log_line)
        self._watches: set[asyncio.Task[None]] = set()

    def members(self, party: Party) -> list[Member]:
        return [member for member in self._members.values() if member.party is party]

    def member(self, name: str) -> Member:
        return self._members[name]

    def member_at(self, endpoint: str) -> str:
        """The name of whoever is known by that endpoint; empty where nobody is."""
        return next((one.name for one in self._members.values() if one.proxy.endpoint == endpoint), "")

    @property
    def pids(self) -> dict[str, int]:
        """By name, of those that run."""
        return {name: pid for name, member in self._members.items() if (pid := member.pid) is not None}

    async def start(self) -> None:
        """Raises RoleFailedError after everything that ran was stopped."""
        self.options.log_folder.mkdir(parents=True, exist_ok=True)
        try:
            for member in self._members.values():
                await member.proxy.start()
            await self.start_member(STORE)
            roles = [one for one in self._members.values() if one.party is not Party.STORE]
            await asyncio.gather(*(self.start_member(member.name) for member in roles))
        except BaseException:
            await self.stop()
            raise

    async def start_member(self, name: str) -> None:
        """A new process behind the same proxy; returns when it serves. Raises RoleFailedError."""
        member = self._members[name]
        if member.party is Party.STORE:
            await self.store.start()
            member.process = self.store.process
            member.direct_endpoint = format_endpoint(HOST, self.store.port)
        else:
            command = RoleCommand(name, self._command_line(member), self._environment(member))
            process = RoleProcess(command, self.options.log_folder / f"{name}.log", self._view.log_line)
            await process.start()
            member.process = process
            listening = await process.wait_for_event(LISTENING, _START_TIMEOUT_S)
            member.direct_endpoint = str(listening["endpoint"])
            member.metrics_endpoint = str(listening.get("metrics", ""))
        member.expected_to_end = False
        member.proxy.server = member.direct_endpoint
        if member.party is not Party.STORE and member.process is not None:
            await member.process.wait_for_event(SERVING, _START_TIMEOUT_S)
        self._watch(member)

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when it has ended."""
        member = self._members[name]
        member.expected_to_end = True
        if member.process is not None:
            member.process.kill()
            await member.process.wait_for_death()
        member.proxy.server = ""

    async def terminate(self, name: str, grace_s: float = _STOP_GRACE_S) -> bool:
        """SIGTERM; returns when it has ended: whether by itself and in order."""
        member = self._members[name]
        member.expected_to_end = True
        in_order = True
        if member.process is not None:
            in_order = await member.process.stop(grace_s) and member.process.exit_code == 0
        member.proxy.server = ""
        return in_order

    def signal(self, name: str, number: signal.Signals) -> None:
        """To a process that runs."""
        pid = self._members[name].pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def stop(self) -> None:
        """In order: orchestrators, drafters, verifiers, the store. Whoever does not end in order is noted."""
        for party in (Party.ORCHESTRATOR, Party.DRAFTER, Party.VERIFIER, Party.STORE):
            members = [member for member in self.members(party) if member.process is not None]
            for member in members:
                self.signal(member.name, signal.SIGCONT)
            for member, in_order in zip(
                members, await asyncio.gather(*(self.terminate(member.name) for member in members)), strict=True
            ):
                if not in_order:
                    code = member.process.exit_code if member.process is not None else None
                    self.unexpected_ends.append(f"{member.name} did not end in order when told to: exit code {code}")
                member.process = None
        for member in self._members.values():
            await member.proxy.stop()

    async def status_of(self, name: str) -> ClusterStatus | None:
        """The system as an orchestrator sees it; None where it does not say so at once."""
        with contextlib.suppress(SpecdecError, TimeoutError):
            async with asyncio.timeout(_ASK_TIMEOUT_S), self._asked(name) as client:
                return await client.cluster_status()
        return None

    async def sessions_of(self, name: str) -> list[SessionSummary] | None:
        """What an orchestrator serves now; None where it does not say so at once."""
        with contextlib.suppress(SpecdecError, TimeoutError):
            async with asyncio.timeout(_ASK_TIMEOUT_S), self._asked(name) as client:
                return [session async for page, _ in client.sessions(_PAGE_SIZE) for session in page]
        return None

    def _asked(self, name: str) -> AdminClient:
        """Past the proxy: whoever looks is not to be struck."""
        return AdminClient(self._members[name].direct_endpoint, Access())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _command_line(self, member: Member) -> Sequence[str]:
        options = self.options
        arguments = ["--listen", LOOPBACK, "--metrics", LOOPBACK]
        match member.party:
            case Party.VERIFIER:
                arguments += ["--model", options.model, "--threads", "1", *options.verifier_arguments]
            case Party.DRAFTER:
                lookup = ("--proposer", "ngram")
                draft = ("--proposer", "draft_model", "--model", options.draft_model, "--quantization", "none")
                model = (*draft, "--threads", "1")
                arguments += [*(model if options.draft_model else lookup), *options.drafter_arguments]
            case Party.ORCHESTRATOR:
                for option, party in (("--verifiers", Party.VERIFIER), ("--drafters", Party.DRAFTER)):
                    arguments += [option, ",".join(one.proxy.endpoint for one in self.members(party))]
                arguments += options.orchestrator_arguments
        return role_command_line(member.party.value, arguments)

    def _environment(self, member: Member) -> dict[str, str]:
        if member.party is not Party.ORCHESTRATOR:
            return _ONE_THREAD
        store = self._members[STORE].proxy.endpoint
        return {**_ONE_THREAD, "SPECDEC_ORCHESTRATOR_REDIS": f"redis://:{self.store.password}@{store}/0"}

    def _watch(self, member: Member) -> None:
        """A process that ends though nobody killed it is a fault that nobody injected."""
        process = member.process
        if process is None:
            return

        async def watch() -> None:
            death = await process.wait_for_death()
            if not member.expected_to_end and member.process is process:
                self.unexpected_ends.append(str(death))
                self._view.say(f"{death}", "red")

        task = asyncio.create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _name_client(self, port: int) -> str:
        """Whose connection from that port it is; this process is the clients'."""
        return await asyncio.to_thread(owner_of_port, port, self.pids) or CLIENT
