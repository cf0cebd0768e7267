"""A link to a server that can be lost and come back."""

import contextlib
from collections.abc import AsyncIterator

from specdec.bench.faults.proxy import FaultProxy


@contextlib.asynccontextmanager
async def proxy_before(endpoint: str) -> AsyncIterator[FaultProxy]:
    """Stands before one server; whoever connects to it is called `client`."""

    async def name(port: int) -> str:
        return "client"

    proxy = FaultProxy(name)
    proxy.server = endpoint
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
