"""The embedded server as a child process."""

import asyncio
import os
import signal
import socket
import sys

import pytest

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.session_store import SessionStore, StoreSettings

pytestmark = pytest.mark.system

_PARENT = """
import asyncio
from orchestrator.embedded_store import EmbeddedStore
async def main():
    store = EmbeddedStore()
    await store.start()
    print(store.port, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def _takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_stopped_server_leaves_neither_process_nor_folder() -> None:
    store = EmbeddedStore()
    await store.start()
    assert store._directory is not None
    folder = store._directory.name
    assert _takes_connections(store.port)
    await store.stop()
    await store.stop()
    assert not _takes_connections(store.port)
    assert not os.path.exists(folder)  # noqa: ASYNC240 - a look at a temporary folder blocks nobody


async def test_two_servers_live_side_by_side_and_a_wrong_password_opens_neither() -> None:
    async with EmbeddedStore() as one, EmbeddedStore() as two:
        assert one.port != two.port
        async with SessionStore(StoreSettings(one.url)) as store:
            assert await store.is_reachable()
        async with SessionStore(StoreSettings(one.url.replace(one.password, two.password))) as store:
            assert not await store.is_reachable()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux only")
async def test_a_killed_parent_takes_its_server_along() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        port = int(await parent.stdout.readline())
        assert _takes_connections(port)
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait()
        while _takes_connections(port):  # noqa: ASYNC110 - another process's end sets no event of ours
            await asyncio.sleep(0.02)
