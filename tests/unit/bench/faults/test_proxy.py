"""A fault proxy between a real client and a real server on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from specdec.bench.faults.proxy import FaultProxy, Rule, Treatment
from specdec.config import format_endpoint, parse_endpoint

TIMEOUT_S = 10.0
HELD_TO_SERVER = Rule(to_server=Treatment.HOLD)
HELD_TO_CLIENT = Rule(to_client=Treatment.HOLD)


class Wire:
    """One connection through the proxy; `server` is the other end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.read(100)


class Server:
    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Wire] = asyncio.Queue()

    async def accept(self) -> Wire:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.accepted.get()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted.put_nowait(Wire(reader, writer))

        listener = await asyncio.start_server(take, "127.0.0.1", 0)
        try:
            yield format_endpoint(*listener.sockets[0].getsockname()[:2])
        finally:
            listener.close()


@contextlib.asynccontextmanager
async def proxied(server: Server) -> AsyncIterator[FaultProxy]:
    """Every client is called `client`."""

    async def name_client(port: int) -> str:
        return "client"

    async with server.listen() as endpoint:
        proxy = FaultProxy(name_client)
        proxy.server = endpoint
        await proxy.start()
        try:
            yield proxy
        finally:
            await proxy.stop()


async def connect(proxy: FaultProxy) -> Wire:
    return Wire(*await asyncio.open_connection(*parse_endpoint(proxy.endpoint)))


async def is_open(wire: Wire) -> bool:
    try:
        return await wire.receive() != b""
    except ConnectionError:
        return False


async def test_bytes_pass_both_ways_and_so_does_the_end() -> None:
    server = Server()
    async with proxied(server) as proxy:
        client = await connect(proxy)
        there = await server.accept()
        await client.send(b"ask")
        assert await there.receive() == b"ask"
        await there.send(b"answer")
        there.writer.close()
        assert await client.receive() == b"answer"
        assert await client.receive() == b""


async def test_what_is_held_in_one_direction_arrives_late_and_the_other_direction_passes() -> None:
    server = Server()
    async with proxied(server) as proxy:
        client = await connect(proxy)
        there = await server.accept()
        proxy.disturb("client", HELD_TO_SERVER)
        await client.send(b"late")
        await there.send(b"meanwhile")
        assert await client.receive() == b"meanwhile"
        assert there.reader._buffer == b""  # type: ignore[attr-defined]
        proxy.heal("client")
        assert await there.receive() == b"late"


async def test_a_rule_holds_for_connections_to_come_and_for_no_other_client() -> None:
    server = Server()
    async with proxied(server) as proxy:
        proxy.disturb("somebody else", HELD_TO_CLIENT)
        proxy.disturb("client", HELD_TO_CLIENT)
        client = await connect(proxy)
        there = await server.accept()
        proxy.heal("client")
        await there.send(b"hello")
        assert await client.receive() == b"hello"


async def test_the_end_of_a_server_is_held_back_like_its_bytes() -> None:
    server = Server()
    async with proxied(server) as proxy:
        client = await connect(proxy)
        there = await server.accept()
        proxy.disturb("client", HELD_TO_CLIENT)
        there.writer.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.read(1)
        proxy.heal("client")
        assert not await is_open(client)


async def test_a_vanished_peer_answers_nothing_while_new_connections_pass() -> None:
    server = Server()
    async with proxied(server) as proxy:
        old = await connect(proxy)
        there = await server.accept()
        proxy.vanish()
        await old.send(b"into the void")
        new = await connect(proxy)
        await (await server.accept()).send(b"hello")
        assert await new.receive() == b"hello"
        assert there.reader._buffer == b""  # type: ignore[attr-defined]
        proxy.heal("client")  # of another fault: what has vanished does not come back
        await there.send(b"unheard")
        proxy.end_vanished()
        assert not await is_open(old)


async def test_a_connection_that_lost_bytes_is_reset_when_it_is_healed() -> None:
    server = Server()
    async with proxied(server) as proxy:
        client = await connect(proxy)
        there = await server.accept()
        proxy.disturb("client", Rule(to_server=Treatment.DROP))
        await client.send(b"lost")
        await there.send(b"heard")
        assert await client.receive() == b"heard"  # the proxy has read what came before
        await asyncio.sleep(0)
        proxy.heal("client")
        assert not await is_open(client)


async def test_a_reset_is_told_to_both_ends() -> None:
    server = Server()
    async with proxied(server) as proxy:
        client = await connect(proxy)
        there = await server.accept()
        proxy.reset("client")
        assert not await is_open(client)
        assert not await is_open(there)


async def test_without_a_server_a_connection_ends_at_once() -> None:
    async with proxied(Server()) as proxy:
        proxy.server = ""
        assert not await is_open(await connect(proxy))
