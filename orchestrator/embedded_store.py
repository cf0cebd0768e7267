"""A real Redis-compatible server (Valkey) as a child process, for a system on one machine.

Knows processes and ports, not sessions. The server listens on a loopback port behind a password drawn at start, keeps
everything in memory, and on Linux the kernel ends it with its parent, however the parent dies.
"""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from importlib import resources
from types import TracebackType
from typing import Self

from specdec.errors import StoreUnavailableError
from specdec.local_store import HOST, free_port, server_binary

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.02
_NUM_PORT_ATTEMPTS = 5


class EmbeddedStore:
    """`async with EmbeddedStore() as store:` then `store.url`. Raises StoreUnavailableError where it does not start.

    A given `port` and `password` bring a server back where another was. Start it from the main thread: the kernel takes
    the end of the thread that started a child for the end of its parent.
    """

    def __init__(self, port: int | None = None, password: str | None = None) -> None:
        self._wanted_port = port
        self.port = 0
        self.password = password or secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    async def start(self) -> None:
        # A free port may be taken between the look and the server's bind: then the server ends and we look again.
        for _ in range(_NUM_PORT_ATTEMPTS):
            self.port = self._wanted_port or free_port()
            self._launch()
            if await self._answers():
                return
            await self.stop()
        raise StoreUnavailableError("the embedded session store did not start")

    async def stop(self) -> None:
        """Ends the server, politely at first. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _launch(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="specdec-store-")
        options = {
            "port": str(self.port),
            "bind": HOST,
            "protected-mode": "yes",
            "requirepass": self.password,
            "save": '""',
            "appendonly": "no",
            "dir": self._directory.name,
            "loglevel": "warning",
        }
        guard = str(resources.files("specdec.cli") / "die_with_parent.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard, str(os.getpid()), server_binary(), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent, which stops the server when its sessions are done
        )
        if self._process.stdin is not None:  # the password is read there: a command line can be seen by everyone
            self._process.stdin.write("".join(f"{name} {value}\n" for name, value in options.items()).encode())
            self._process.stdin.close()

    async def _answers(self) -> bool:
        """Until the server takes its password, or ended, or the time is up."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while self._process is not None and self._process.poll() is None:
                    if await _takes_password(self.port, self.password):
                        return True
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            pass
        return False


async def _takes_password(port: int, password: str) -> bool:
    """Proves that the server on the port is ours, not one that had the port first."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    try:
        writer.write(f"AUTH {password}\r\n".encode())
        return await reader.readline() == b"+OK\r\n"
    except OSError:
        return False
    finally:
        writer.close()
