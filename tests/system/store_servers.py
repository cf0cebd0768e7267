"""Real servers behind a session store, in every arrangement: one, a primary with a replica and a Sentinel, a cluster.

The binary is the embedded server's. Whatever is told to die is killed, as a machine that loses its power.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from importlib import resources
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from specdec.local_store import HOST, server_binary

START_TIMEOUT_S = 20.0
FAILOVER_TIMEOUT_S = 30.0
_BUS_PORT_OFFSET = 10_000
_LAST_PORT = 65_535 - _BUS_PORT_OFFSET
NUM_CLUSTER_NODES = 3
NUM_SLOTS = 16_384


def free_port() -> int:
    """One that leaves room for a cluster's bus beside it."""
    while True:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            port = int(listener.getsockname()[1])
        if port <= _LAST_PORT:
            return port


class StoreServer:
    """One process on a port and in a folder of its own, which both outlive it."""

    def __init__(self, folder: Path, *lines: str, sentinel: bool = False) -> None:
        self.port = free_port()
        self.folder = folder
        self._lines = lines
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def client(self) -> "Redis":
        return Redis(host=HOST, port=self.port, socket_timeout=5.0)

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        if not config.exists():
            head = (f"port {self.port}", f"bind {HOST}", f"dir {self.folder}", "loglevel warning", 'save ""')
            lines = [line for line in (*head, *self._lines) if not (self._sentinel and line.startswith("save"))]
            config.write_text("\n".join(lines) + "\n")
        command = [server_binary(), str(config), *(["--sentinel"] if self._sentinel else [])]
        self._process = _launched(command)
        await until(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def restart_with(self, folder_copy: Path) -> None:
        """Killed, and back with the files of an earlier moment."""
        self.kill()
        shutil.rmtree(self.folder)
        shutil.copytree(folder_copy, self.folder)
        await self.start()

    async def _answers(self) -> bool:
        async with self.client() as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False


class StoreCluster:
    """Three primaries that share the slots evenly."""

    def __init__(self, folder: Path) -> None:
        lines = ("cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 1000",
                 "cluster-require-full-coverage no")  # fmt: skip
        self.nodes = [StoreServer(folder / f"node{index}", *lines) for index in range(NUM_CLUSTER_NODES)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    async def start(self) -> None:
        for node in self.nodes:
            await node.start()
        each = NUM_SLOTS // NUM_CLUSTER_NODES + 1
        for index, node in enumerate(self.nodes):
            async with node.client() as client:
                first = index * each
                last = min(first + each, NUM_SLOTS) - 1
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                if index > 0:
                    await client.execute_command("CLUSTER", "MEET", HOST, self.nodes[0].port)
        await until(self.is_whole)

    async def is_whole(self) -> bool:
        for node in self.nodes:
            async with node.client() as client:
                info = await client.execute_command("CLUSTER", "INFO")
                nodes = await client.execute_command("CLUSTER", "NODES")
            told = info if isinstance(info, dict) else dict(line.split(":") for line in _text(info).splitlines())
            is_ok = told["cluster_state"] == "ok" and str(told["cluster_slots_ok"]) == str(NUM_SLOTS)
            if not is_ok or len(nodes) < NUM_CLUSTER_NODES:
                return False
        return True

    async def move_slot(self, slot: int) -> None:
        """The slot and its keys go from the node that has it to the next one."""
        ids = [await self._id(node) for node in self.nodes]
        source = slot // (NUM_SLOTS // NUM_CLUSTER_NODES + 1)
        target = (source + 1) % NUM_CLUSTER_NODES
        async with self.nodes[source].client() as giving, self.nodes[target].client() as taking:
            await taking.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
            await giving.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            while keys := await giving.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                await giving.execute_command("MIGRATE", HOST, self.nodes[target].port, "", 0, 5000, "KEYS", *keys)
            for client in (taking, giving):
                await client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    async def total_keys(self) -> int:
        total = 0
        for node in self.nodes:
            async with node.client() as client:
                total += int(await client.dbsize())
        return total

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    async def _id(self, node: StoreServer) -> str:
        async with node.client() as client:
            return _text(await client.execute_command("CLUSTER", "MYID"))


class WatchedPrimary:
    """A primary, its replica, and a Sentinel that promotes the replica when the primary has been away for a second."""

    SERVICE = "sessions"

    def __init__(self, folder: Path) -> None:
        self.primary = StoreServer(folder / "primary", "repl-diskless-sync-delay 0")
        self.replica = StoreServer(folder / "replica", f"replicaof {HOST} {self.primary.port}")
        watched = f"sentinel monitor {self.SERVICE} {HOST} {self.primary.port} 1"
        timings = (
            f"sentinel down-after-milliseconds {self.SERVICE} 1000",
            f"sentinel failover-timeout {self.SERVICE} 5000",
        )
        self.sentinel = StoreServer(folder / "sentinel", watched, *timings, sentinel=True)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{HOST}:{self.sentinel.port}/{self.SERVICE}"

    async def start(self) -> None:
        await self.primary.start()
        await self.replica.start()
        await until(self._replicates)
        await self.sentinel.start()
        await until(self._sentinel_knows_the_replica)

    async def replica_is_primary(self) -> bool:
        async with self.replica.client() as client:
            return bool((await client.info("replication"))["role"] == "master")

    def kill(self) -> None:
        for server in (self.sentinel, self.replica, self.primary):
            server.kill()

    async def _replicates(self) -> bool:
        async with self.replica.client() as client:
            return bool((await client.info("replication")).get("master_link_status") == "up")

    async def _sentinel_knows_the_replica(self) -> bool:
        async with self.sentinel.client() as client:
            return len(await client.execute_command("SENTINEL", "REPLICAS", self.SERVICE)) > 0


@contextlib.asynccontextmanager
async def running(servers: Any) -> AsyncIterator[Any]:
    """Any of the above, started, and killed in the end."""
    try:
        await servers.start()
        yield servers
    finally:
        servers.kill()


async def until(condition: Callable[[], Any], timeout_s: float = START_TIMEOUT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - another process sets no event of ours
            await asyncio.sleep(0.05)


def _launched(command: list[str]) -> subprocess.Popen[bytes]:
    """It does not outlive this process, however that ends."""
    guard = [sys.executable, "-I", "-S", str(resources.files("specdec.cli") / "die_with_parent.py"), str(os.getpid())]
    return subprocess.Popen([*guard, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
