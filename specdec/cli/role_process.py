"""One role as a child process: starts it, reads its log, stops it. Knows the two log events that every role writes,
"listening" (with its endpoints) and "serving", and nothing else of what a role does."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_GUARD = Path(__file__).with_name("die_with_parent.py")
_MAX_LINE_BYTES = 64 * 1024
_KEPT_LINES = 30
_READ_BYTES = 16 * 1024
_KILL_S = 5.0

LogEvent = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RoleCommand:
    """What to run. `name` is unique within a cluster, as in `drafter-1`."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class RoleFailedError(Exception):
    """A role died, or did not become ready in time. `last_lines` is the end of its log."""

    def __init__(self, name: str, what: str, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name} {what}")
        self.name = name
        self.what = what
        self.last_lines = tuple(last_lines)


class RoleProcess:
    """A child in a process group of its own (a terminal's Ctrl-C reaches the parent alone, which stops all in order)
    that dies with its parent. Its stdout and stderr go to `log_path` and, line by line, to `on_line`."""

    def __init__(self, command: RoleCommand, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        self.name = command.name
        self.log_path = log_path
        self.last_event = ""
        self._started_at = time.monotonic()
        self._command = command
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._events: dict[str, LogEvent] = {}
        self._changed = asyncio.Event()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ProcessLookupError(f"{self.name} was not started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._last_lines)

    def has_logged(self, event: str) -> bool:
        return event in self._events

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_at

    async def start(self) -> None:
        # A pipe of our own: asyncio's would delay the news of the child's end until its own children close theirs.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())),
                *self._command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self._command.environment},
                process_group=0,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._life = asyncio.create_task(self._live(self._process, read_end), name=f"life of {self.name}")

    async def wait_for_event(self, event: str, timeout_s: float) -> LogEvent:
        """The first log line with that event.

        Raises:
            RoleFailedError: the process ended first, or the time is up.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while event not in self._events:
                    if self._life is None or self._life.done():
                        raise self._death()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            what = f"did not log {event!r} within {timeout_s:g} s"
            raise RoleFailedError(self.name, what, self._last_lines) from None
        return self._events[event]

    async def wait_for_death(self) -> RoleFailedError:
        """Returns, as an error to raise or report, once the process has ended and its log is read."""
        if self._life is not None:
            await asyncio.wait([self._life])
        return self._death()

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, `grace_s` to end, then SIGKILL to its whole group. Whether it ended by itself. Idempotent."""
        if self._process is None or self._life is None:
            return True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._life], timeout=grace_s)
        if not done:
            self.kill()
            await asyncio.wait([self._life], timeout=_KILL_S)
        return bool(done)

    def kill(self) -> None:
        """SIGKILL to its whole group, unless it was seen to end: the number may be another's by then."""
        if self._life is None or self._life.done():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _death(self) -> RoleFailedError:
        code = self.exit_code
        return RoleFailedError(self.name, "was not started" if code is None else _describe_exit(code), self._last_lines)

    async def _live(self, process: asyncio.subprocess.Process, log_fd: int) -> None:
        """Until the process has ended and its log is read. What it left of its group goes with it."""
        reader = asyncio.create_task(self._read_log(log_fd), name=f"log of {self.name}")
        try:
            await process.wait()
            self.kill()
            await asyncio.wait([reader], timeout=_KILL_S)
        finally:
            reader.cancel()
            self._changed.set()

    async def _read_log(self, log_fd: int) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(log_fd, "rb", buffering=0)
        )
        partial = b""
        try:
            with self.log_path.open("ab", buffering=0) as log_file:
                while chunk := await stream.read(_READ_BYTES):
                    *lines, partial = (partial + chunk).split(b"\n")
                    if len(partial) > _MAX_LINE_BYTES:
                        lines, partial = [*lines, partial], b""
                    self._take_lines(lines, log_file)
                self._take_lines([partial] if partial else [], log_file)
        finally:
            transport.close()

    def _take_lines(self, lines: Sequence[bytes], log_file: IO[bytes]) -> None:
        for raw in lines:
            log_file.write(raw + b"\n")
            line = raw.decode(errors="replace").rstrip()
            self._last_lines.append(line)
            self._on_line(self.name, line)
            record = _parse_record(line)
            if record is not None:
                self.last_event = str(record["event"])
                self._events.setdefault(self.last_event, record)
        self._changed.set()


def _parse_record(line: str) -> LogEvent | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
