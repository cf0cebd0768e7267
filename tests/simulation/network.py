"""Hosts, the links between them and the connections over those: what is sent arrives in order, late, or never.

Knows connections as TCP has them: bytes of a link that is cut wait and arrive once it heals, unless keepalive breaks
the connection before; a connection that broke loses what was on its way. Knows no calls (see rpc.py).
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tests.simulation.virtual_time import NOBODY, Process, VirtualLoop

LATENCY_S = 0.002
CONNECT_TIMEOUT_S = 5.0


class End(Protocol):
    """Who is told that a connection is gone."""

    def broken(self, reason: str) -> None: ...


@dataclasses.dataclass(eq=False)
class Link:
    """One direction between two hosts."""

    latency_s: float = LATENCY_S
    is_cut: bool = False
    held: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Datagrams that wait for the link."""


@dataclasses.dataclass(eq=False)
class Lane:
    """One direction of one connection."""

    link: Link
    sent: deque[tuple[float, Callable[[], None]]] = dataclasses.field(default_factory=deque)
    last_due: float = 0.0


class Connection:
    """Between a client's process and a server's. `ends` of both sides hear of its break."""

    def __init__(self, network: "Network", client: Process, server: Process, keepalive_s: float) -> None:
        self.network, self.client, self.server, self.keepalive_s = network, client, server, keepalive_s
        self.is_open = True
        self.ends: dict[End, None] = {}
        self._lanes = {
            client.name: Lane(network.link(client.name, server.name)),
            server.name: Lane(network.link(server.name, client.name)),
        }
        self._silent_since: float | None = None

    def send(self, sender: Process, deliver: Callable[[], None]) -> None:
        """What a dead process or a broken connection sends arrives nowhere."""
        if not self.is_open or sender.is_dead:
            return
        loop, lane = self.network.loop, self._lanes[sender.name]
        lane.last_due = max(lane.last_due, loop.now + lane.link.latency_s)
        lane.sent.append((lane.last_due, deliver))
        loop.call_at(lane.last_due, self._pump, lane, context=NOBODY)

    def look(self) -> None:
        """Something about its links or processes changed: go on, or begin to wait for keepalive."""
        if not self.is_open:
            return
        for lane in self._lanes.values():
            self._pump(lane)
        if self._is_silent:
            if self._silent_since is None:
                self._silent_since = self.network.loop.now
                self.network.loop.call_later(self.keepalive_s, self._expire, self._silent_since, context=NOBODY)
        else:
            self._silent_since = None
            if self.client.is_dead or self.server.is_dead:
                self.close("connection reset")

    def close(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.network.connections.pop(self, None)
            for end in list(self.ends):
                end.broken(reason)

    @property
    def _is_silent(self) -> bool:
        paused = self.client.is_paused or self.server.is_paused
        return paused or any(lane.link.is_cut for lane in self._lanes.values())

    def _expire(self, since: float) -> None:
        if self._silent_since == since:
            self.close("keepalive timed out")

    def _pump(self, lane: Lane) -> None:
        while self.is_open and lane.sent and not lane.link.is_cut and lane.sent[0][0] <= self.network.loop.now:
            _, deliver = lane.sent.popleft()
            deliver()


class Network:
    """All hosts by name; who listens at which endpoint."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.connections: dict[Connection, None] = {}
        self.listeners: dict[str, Process] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._changed = asyncio.Event()

    def link(self, source: str, target: str) -> Link:
        return self._links.setdefault((source, target), Link())

    def datagram(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """What has its own connection, such as a call to the store: late where the link is cut, never lost."""
        link = self.link(source, target)

        def arrive() -> None:
            if link.is_cut:
                link.held.append(deliver)
            else:
                deliver()

        self.loop.call_later(link.latency_s, arrive, context=NOBODY)

    def set_cut(self, source: str, target: str, *, is_cut: bool) -> None:
        link = self.link(source, target)
        link.is_cut = is_cut
        self._release(link)
        self.look()

    def reset(self, one: str, other: str) -> None:
        """Breaks what is connected between two hosts; they may connect again at once."""
        for connection in list(self.connections):
            if {connection.client.name, connection.server.name} == {one, other}:
                connection.close("connection reset")

    def heal(self) -> None:
        for link in self._links.values():
            link.is_cut, link.latency_s = False, LATENCY_S
            self._release(link)
        self.look()

    def _release(self, link: Link) -> None:
        if not link.is_cut:
            held, link.held = link.held, []
            for deliver in held:
                self.loop.call_soon(deliver, context=NOBODY)

    def look(self) -> None:
        """To be called after every change of a process or link."""
        for endpoint, process in list(self.listeners.items()):
            if process.is_dead:
                del self.listeners[endpoint]
        for connection in list(self.connections):
            connection.look()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def connect(self, client: Process, endpoint: str, keepalive_s: float) -> Connection | None:
        """None where nobody listens, or nobody answers in time."""
        loop = self.loop
        give_up_at = loop.now + CONNECT_TIMEOUT_S
        host = self.host_of(endpoint)
        await asyncio.sleep(2 * self.link(client.name, host).latency_s)
        while True:
            server = self.listeners.get(endpoint)
            is_cut = self.link(client.name, host).is_cut or self.link(host, client.name).is_cut
            if not is_cut:
                if server is None:
                    return None
                if not server.is_paused:
                    connection = Connection(self, client, server, keepalive_s)
                    self.connections[connection] = None
                    return connection
            if loop.now >= give_up_at:
                return None
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._changed.wait()
            except TimeoutError:
                return None

    def host_of(self, endpoint: str) -> str:
        return self.hosts[endpoint]

    hosts: dict[str, str]
    """By endpoint; set once for all."""
