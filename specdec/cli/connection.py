"""A client's connection to one orchestrator: how it comes in, how it ends, and what a fault of a call means."""

from types import TracebackType
from typing import Self

import grpc

from specdec.cli.access import Access
from specdec.errors import PeerUnavailableError, SpecdecError
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import error_from_rpc


class Connection:
    """`async with` closes it. What clients of one service build on."""

    def __init__(self, endpoint: str, access: Access) -> None:
        """Needs a running event loop; raises ValueError for what is not host:port."""
        self._endpoint = endpoint
        self._access = access
        self._token_metadata = grpc.aio.Metadata(*access.metadata)
        self._channel = open_channel(endpoint, credentials=access.credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    def _error(self, error: grpc.aio.AioRpcError) -> SpecdecError:
        known = error_from_rpc(error)
        return self._access.unreachable(self._endpoint, known.message) if type(known) is PeerUnavailableError else known
