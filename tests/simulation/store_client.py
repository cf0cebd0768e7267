"""In the client library's place: commands to the simulated Redis over the simulated network. One server, no cluster."""

import asyncio
import builtins
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError, TimeoutError

from tests.simulation.network import Network
from tests.simulation.rpc import own_process
from tests.simulation.store import RedisServer

STORE_HOST = "store"
REFUSED_AFTER_S = 0.005


class StoreLink:
    """The way to the one server: away (refuses), or losing replies, as the world says."""

    def __init__(self, network: Network, server: RedisServer) -> None:
        self.network, self.server = network, server
        self.is_away = False
        self.replies_to_lose = 0

    async def round_trip(self, commands: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
        """Replies and errors. A request that is under way when its caller gives up may still be run, and late."""
        process = own_process()
        if self.is_away:
            await asyncio.sleep(REFUSED_AFTER_S)
            raise ConnectionError("connection refused")
        replied: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

        def serve() -> None:
            if self.is_away:
                return
            replies = [self.server.execute(*command) for command in commands]
            if self.replies_to_lose > 0:
                self.replies_to_lose -= 1
                return
            self.network.datagram(STORE_HOST, process.name, lambda: replied.done() or replied.set_result(replies))

        self.network.datagram(process.name, STORE_HOST, serve)
        try:
            async with asyncio.timeout(timeout_s):
                return await replied
        except builtins.TimeoutError:
            raise TimeoutError("Timeout reading from socket") from None


class SimRedis:
    """As much of redis.asyncio.Redis as the session store uses."""

    def __init__(self, link: StoreLink, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self.connection_pool = self

    async def disconnect(self, inuse_connections: bool = True) -> None: ...

    async def aclose(self) -> None: ...

    async def ping(self) -> bool:
        return bool(await self.execute_command("PING"))

    async def execute_command(self, *command: Any) -> Any:
        (reply,) = await self._link.round_trip([command], self._timeout_s)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, transaction: bool = False) -> "SimPipeline":
        return SimPipeline(self._link, self._timeout_s)


class SimPipeline:
    def __init__(self, link: StoreLink, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        self._commands: list[Sequence[Any]] = []

    def execute_command(self, *command: Any) -> None:
        self._commands.append(command)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        return await self._link.round_trip(commands, self._timeout_s)

    async def __aenter__(self) -> "SimPipeline":
        return self

    async def __aexit__(self, *_: object) -> None: ...
