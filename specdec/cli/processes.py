"""Every role on this machine: one verifier, some drafters and an orchestrator as real child processes. Used by `up`,
`demo`, `bench` and the system tests. Knows which role needs whose endpoint and in which order to start and stop them;
refuses to know how to print."""

import asyncio
import dataclasses
import enum
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from specdec.cli.cluster_options import (
    ClusterOptions,
    CommandBuilder,
    drafter_arguments,
    orchestrator_arguments,
    orchestrator_environment,
    role_command_line,
    verifier_arguments,
)
from specdec.cli.role_process import RoleCommand, RoleFailedError, RoleProcess

_TICK_S = 2.0
LISTENING = "listening"
SERVING = "serving"


class RoleState(enum.Enum):
    STARTED = "started"
    LISTENING = "listening"
    WAITING = "waiting"
    READY = "ready"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclasses.dataclass(frozen=True)
class RoleProgress:
    """Something to tell about a role. `detail` is its endpoint or, while it waits, what it last said in its log."""

    name: str
    state: RoleState
    elapsed_s: float
    detail: str = ""


class LocalCluster:
    """`async with LocalCluster(options) as cluster:` starts every role and leaves none behind.

    Must be entered from a thread that outlives the cluster (see die_with_parent). Errors of `start`: RoleFailedError,
    after everything that ran was stopped.
    """

    def __init__(
        self,
        options: ClusterOptions,
        *,
        on_progress: Callable[[RoleProgress], None] = lambda progress: None,
        on_line: Callable[[str, str], None] = lambda name, line: None,
        command_builder: CommandBuilder = role_command_line,
    ) -> None:
        self.options = options
        self.log_folder = options.log_folder or Path(tempfile.mkdtemp(prefix="specdec-logs-"))
        self._on_progress = on_progress
        self._on_line = on_line
        self._build_command = command_builder
        self._processes: list[RoleProcess] = []
        self._endpoints: dict[str, str] = {}
        self._metrics_endpoints: dict[str, str] = {}

    @property
    def endpoint(self) -> str:
        """Where clients connect: the orchestrator's host:port."""
        return self._endpoints["orchestrator"]

    @property
    def endpoints(self) -> Mapping[str, str]:
        """host:port by process name."""
        return dict(self._endpoints)

    @property
    def metrics_endpoints(self) -> Mapping[str, str]:
        """host:port of /metrics by process name, where there is one."""
        return dict(self._metrics_endpoints)

    @property
    def pids(self) -> Mapping[str, int]:
        return {process.name: process.pid for process in self._processes}

    async def start(self) -> None:
        """Returns when every role says that it serves."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self.options.start_timeout_s):
                await self._start_roles()
        except TimeoutError:
            unready = next((process for process in self._processes if not process.has_logged(SERVING)), None)
            await self.stop()
            name, lines = (unready.name, unready.last_lines) if unready else ("the cluster", ())
            raise RoleFailedError(name, f"was not ready within {self.options.start_timeout_s:g} s", lines) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """The orchestrator first, then the drafters, then the verifier: nobody loses a peer it still needs."""
        for role in ("orchestrator", "drafter", "verifier"):
            group = [process for process in self._processes if process.name.partition("-")[0] == role]
            await asyncio.gather(*(self._stop_role(process) for process in group))
        self._processes = []

    def kill(self) -> None:
        """Ends every role at once; `stop` then returns soon."""
        for process in self._processes:
            process.kill()

    async def deaths(self) -> AsyncIterator[RoleFailedError]:
        """Each role that ends by itself, as it ends."""
        waits = [asyncio.create_task(process.wait_for_death()) for process in self._processes]
        try:
            for death in asyncio.as_completed(waits):
                yield await death
        finally:
            for wait in waits:
                wait.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start_roles(self) -> None:
        options = self.options
        workers = []
        if options.verifier_endpoint is not None:
            self._endpoints["verifier"] = options.verifier_endpoint
        else:
            workers.append(await self._start_role("verifier", "verifier", verifier_arguments(options)))
        for index in range(options.num_drafters if options.proposer != "none" else 0):
            workers.append(await self._start_role("drafter", f"drafter-{index}", drafter_arguments(options)))
        await self._until_all(*(self._wait_listening(worker) for worker in workers))
        arguments = orchestrator_arguments(options, self._endpoints)
        environment = orchestrator_environment(options)
        orchestrator = await self._start_role("orchestrator", "orchestrator", arguments, environment)
        readiness = [self._wait_ready(process) for process in self._processes]
        await self._until_all(self._wait_listening(orchestrator), *readiness)

    async def _start_role(
        self, role: str, name: str, arguments: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> RoleProcess:
        extra = self.options.extra_arguments.get(role, ())
        command = RoleCommand(name, self._build_command(role, [*arguments, *extra]), environment)
        process = RoleProcess(command, self.log_folder / f"{name}.log", self._on_line)
        self._processes.append(process)
        await process.start()
        self._report(process, RoleState.STARTED)
        return process

    async def _until_all(self, *waits: Coroutine[None, None, None]) -> None:
        """All of them, or the first failure of any: the others are not waited for."""
        try:
            async with asyncio.TaskGroup() as group:
                for wait in waits:
                    group.create_task(wait)
        except* RoleFailedError as failures:
            raise failures.exceptions[0] from None

    async def _wait_listening(self, process: RoleProcess) -> None:
        record = await process.wait_for_event(LISTENING, self.options.start_timeout_s)
        self._endpoints[process.name] = str(record["endpoint"])
        if record.get("metrics"):
            self._metrics_endpoints[process.name] = str(record["metrics"])
        self._report(process, RoleState.LISTENING, self._endpoints[process.name])

    async def _wait_ready(self, process: RoleProcess) -> None:
        wait = asyncio.create_task(process.wait_for_event(SERVING, self.options.start_timeout_s))
        try:
            while not (await asyncio.wait([wait], timeout=_TICK_S))[0]:
                self._report(process, RoleState.WAITING, process.last_event)
            wait.result()
        finally:
            wait.cancel()
        self._report(process, RoleState.READY, self._endpoints.get(process.name, ""))

    async def _stop_role(self, process: RoleProcess) -> None:
        if process.exit_code is not None:
            return
        ended_by_itself = await process.stop(self.options.stop_grace_s)
        self._report(process, RoleState.STOPPED if ended_by_itself else RoleState.KILLED)

    def _report(self, process: RoleProcess, state: RoleState, detail: str = "") -> None:
        self._on_progress(RoleProgress(process.name, state, process.age_s, detail))
