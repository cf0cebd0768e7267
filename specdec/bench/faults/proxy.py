"""A TCP proxy on loopback that does to bytes what a bad network does. Knows connections and who made them, not what
is said on them.

Bytes that are held back arrive late, as after a partition in which TCP repeats what was not acknowledged. Bytes that
are dropped are gone, though their sender was told that they arrived: the peer has vanished behind an open connection.
A stream with a hole would be a fault that no network has, so a connection that lost bytes is reset when it is healed.
"""

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Awaitable, Callable
from enum import Enum

from specdec.config import format_endpoint, parse_endpoint

_HOST = "127.0.0.1"
_CHUNK_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 5.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Treatment(Enum):
    """Of the bytes of one direction."""

    PASS = "PASS"  # noqa: S105 - no password
    HOLD = "HOLD"
    DROP = "DROP"


@dataclasses.dataclass(frozen=True)
class Rule:
    """`delay_s` is how long each piece of either direction is kept before it goes on."""

    to_server: Treatment = Treatment.PASS
    to_client: Treatment = Treatment.PASS
    delay_s: float = 0.0


UNDISTURBED = Rule()
VANISHED = Rule(Treatment.DROP, Treatment.DROP)


class FaultProxy:
    """Stands before one server. `server` is its host:port, empty while there is none; it may move.

    `name_client` tells who connected, from the port that the connection comes from.
    """

    def __init__(self, name_client: Callable[[int], Awaitable[str]]) -> None:
        self.server = ""
        self.endpoint = ""
        self._name_client = name_client
        self._rules: dict[str, Rule] = {}
        self._connections: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, _HOST, 0)
        self.endpoint = format_endpoint(*self._listener.sockets[0].getsockname()[:2])

    async def stop(self) -> None:
        """Ends all connections. Safe to call twice."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self.reset(None)
        for connection in list(self._connections):
            await connection.ended.wait()

    def disturb(self, client: str, rule: Rule) -> None:
        """From now on, for all connections of that client, those to come too."""
        self._rules[client] = rule
        for connection in self._of(client):
            connection.obey(rule)

    def heal(self, client: str) -> None:
        """What was held back arrives; connections that lost bytes are reset."""
        self._rules.pop(client, None)
        for connection in self._of(client):
            connection.heal()

    def vanish(self) -> None:
        """The connections that there are stay open, and nothing comes through any more. New ones are as usual."""
        for connection in self._of(None):
            connection.vanished = True
            connection.obey(VANISHED)

    def end_vanished(self) -> None:
        """Both ends are told at last, those that did not notice by themselves."""
        for connection in self._of(None):
            if connection.vanished:
                connection.reset()

    def reset(self, client: str | None) -> None:
        """Resets the connections of that client; None: of all."""
        for connection in self._of(client):
            connection.reset()

    @property
    def clients(self) -> set[str]:
        """Who is connected now."""
        return {connection.client for connection in self._connections}

    def _of(self, client: str | None) -> list["_Connection"]:
        return [connection for connection in self._connections if client in (None, connection.client)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = await self._name_client(writer.get_extra_info("peername")[1])
        connection = _Connection(client, self._rules.get(client, UNDISTURBED), reader, writer)
        self._connections.add(connection)
        try:
            await connection.run(self.server)
        finally:
            self._connections.discard(connection)
            connection.ended.set()


class _Connection:
    """One connection, both directions."""

    def __init__(self, client: str, rule: Rule, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.client = client
        self._rule = rule
        self.vanished = False
        self._lost_bytes = False
        self.ended = asyncio.Event()
        self._reader, self._writer = reader, writer
        self._changed = asyncio.Event()
        self._reset = asyncio.Event()

    def obey(self, rule: Rule) -> None:
        """What has vanished does not come back."""
        self._rule = VANISHED if self.vanished else rule
        self._changed.set()

    def heal(self) -> None:
        if self._lost_bytes and not self.vanished:
            self.reset()
        else:
            self.obey(UNDISTURBED)

    def reset(self) -> None:
        self._reset.set()

    async def run(self, server: str) -> None:
        """Until both ends have closed, one has broken, or it is reset; then neither has it any more."""
        writers = [self._writer]
        in_order = False
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                host, port = parse_endpoint(server)
                reader, writer = await asyncio.open_connection(host, port)
            writers.append(writer)
            in_order = await self._relay(reader, writer)
        except (OSError, ValueError, TimeoutError):  # nobody serves: as where a port is closed
            pass
        finally:
            for each in writers:
                _close(each, in_order=in_order)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether both ends closed by themselves."""
        pumps = {
            asyncio.create_task(self._pump(self._reader, writer, lambda rule: rule.to_server)),
            asyncio.create_task(self._pump(reader, self._writer, lambda rule: rule.to_client)),
        }
        resetting = asyncio.create_task(self._reset.wait())
        try:
            waiting = {*pumps, resetting}
            while len(waiting) > 1 and not resetting.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(pump.exception() is not None for pump in done & pumps):
                    return False
            return not resetting.done()
        finally:
            for task in (*pumps, resetting):
                task.cancel()
            await asyncio.wait([*pumps, resetting])

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, treatment: Callable[[Rule], Treatment]
    ) -> None:
        """Raises OSError where the connection broke: what broke at one end breaks at the other."""
        while True:
            chunk = await reader.read(_CHUNK_BYTES)
            if self._rule.delay_s:
                await asyncio.sleep(self._rule.delay_s)
            while treatment(self._rule) is Treatment.HOLD:
                self._changed.clear()
                await self._changed.wait()
            if treatment(self._rule) is Treatment.DROP:
                self._lost_bytes = True
                if not chunk:
                    await self._reset.wait()  # nobody hears of the end either
                    return
                continue
            if not chunk:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()


def _close(writer: asyncio.StreamWriter, *, in_order: bool) -> None:
    """In order, what is still on its way arrives; else the other end is told that the connection broke."""
    if in_order:
        writer.close()
        return
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
