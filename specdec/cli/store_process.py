"""A Redis-compatible server (Valkey) of our own that keeps its data on disk, so that it can be killed and come back
with all of it, without its last second, or empty. Knows files and a few words of the protocol, not what is stored."""

import asyncio
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from specdec.cli.role_process import RoleCommand, RoleFailedError, RoleProcess
from specdec.local_store import HOST, free_port, server_binary

_START_TIMEOUT_S = 20.0
_ASK_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.05
_STOP_GRACE_S = 5.0
_KEYSPACE = re.compile(rb"db0:keys=(\d+),expires=(\d+)")


class StoreProcess:
    """`start` it, then `port` and `password`. One that was killed starts again on another port, with what its folder
    still has."""

    def __init__(self, folder: Path, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        self.port = 0
        self.password = secrets.token_urlsafe(24)
        self.process: RoleProcess | None = None
        self._data = folder / "store"
        self._configuration = folder / "store.conf"
        self._log_path, self._on_line = log_path, on_line

    async def start(self) -> None:
        """Raises RoleFailedError where it does not answer in time, StoreUnavailableError where there is none to run."""
        self.port = free_port()
        self._data.mkdir(parents=True, exist_ok=True)
        self._configuration.touch(mode=0o600)  # it holds the password
        self._configuration.write_text(
            f"port {self.port}\nbind {HOST}\nrequirepass {self.password}\ndir {self._data}\n"
            'save ""\nappendonly yes\nappendfsync everysec\nloglevel notice\n',
            encoding="utf-8",
        )
        command = RoleCommand("store", [server_binary(), str(self._configuration)])
        self.process = RoleProcess(command, self._log_path, self._on_line)
        await self.process.start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not await self._answers():
                    if self.process.exit_code is not None:
                        raise await self.process.wait_for_death()
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise RoleFailedError("store", "did not answer", self.process.last_lines) from None

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop(_STOP_GRACE_S)

    def log_bytes(self) -> dict[Path, int]:
        """How much of its log of writes is on disk now, by file."""
        return {path: path.stat().st_size for path in self._data.rglob("*.aof")}

    def lose_since(self, log_bytes: dict[Path, int]) -> None:
        """Forgets what was written since then. It must not be running."""
        for path in self._data.rglob("*.incr.aof"):
            with path.open("r+b") as log_file:
                log_file.truncate(min(path.stat().st_size, log_bytes.get(path, 0)))

    def lose_all(self) -> None:
        """Forgets everything. It must not be running."""
        for path in sorted(self._data.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    async def count_keys(self) -> tuple[int, int]:
        """All keys, and those of them that never expire. Raises OSError where it does not answer."""
        found = _KEYSPACE.search(await self._ask("INFO keyspace"))
        if found is None:
            return 0, 0
        num_keys, num_expiring = map(int, found.groups())
        return num_keys, num_keys - num_expiring

    async def _answers(self) -> bool:
        """Not before it has read its data: until then it says so."""
        try:
            return (await self._ask("PING")).startswith(b"+PONG")
        except OSError:
            return False

    async def _ask(self, command: str) -> bytes:
        """The first line of the reply and, of a bulk reply, the rest. Raises OSError."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, self.port)
            try:
                writer.write(f"AUTH {self.password}\r\n{command}\r\n".encode())
                if await reader.readline() != b"+OK\r\n":
                    raise OSError("the store does not take its password")
                reply = await reader.readline()
                return await reader.readexactly(int(reply[1:])) if reply.startswith(b"$") else reply
            except (asyncio.IncompleteReadError, ValueError) as error:
                raise OSError("the store's reply broke off") from error
            finally:
                writer.close()
