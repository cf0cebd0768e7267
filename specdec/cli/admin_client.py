"""A thin client of AdminService: typed messages in and out, a deadline on every call, faults as the error tree."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import grpc

from specdec.cli.access import Access
from specdec.cli.connection import Connection
from specdec.errors import SpecdecError
from specdec.messages.cluster import ClusterStatus, DrainOrder, SessionSummary
from specdec.v1 import admin_pb2, admin_pb2_grpc
from specdec.wire.convert.cluster import cluster_status_from_pb, session_summary_from_pb
from specdec.wire.convert.scalars import duration_to_pb

Request = TypeVar("Request")
Response = TypeVar("Response")

_CALL_TIMEOUT_S = 10.0


class AdminClient(Connection):
    """`async with AdminClient("host:port") as client:`. Every call raises SpecdecError: what the server refused or how
    it failed; PeerUnavailableError where none answers."""

    def __init__(self, endpoint: str, access: Access) -> None:
        """Needs a running event loop. `endpoint`: of an orchestrator; raises ValueError for what is not host:port."""
        super().__init__(endpoint, access)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def cluster_status(self) -> ClusterStatus:
        response = await self._answer(self._stub.GetClusterStatus, admin_pb2.GetClusterStatusRequest())
        return self._read(response.status)

    async def watch(self, interval_s: float) -> AsyncGenerator[ClusterStatus, None]:
        """The same again and again, until the iterator is closed; keepalive finds a dead peer."""
        request = admin_pb2.WatchClusterStatusRequest(interval=duration_to_pb(interval_s))
        call = self._stub.WatchClusterStatus(request, metadata=self._token_metadata)
        try:
            async for response in call:
                yield self._read(response.status)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        finally:
            call.cancel()

    async def sessions(self, page_size: int) -> AsyncIterator[tuple[list[SessionSummary], bool]]:
        """Page by page, in the order of their ids, and whether another page follows."""
        page_token = ""
        while True:
            request = admin_pb2.ListSessionsRequest(page_size=page_size, page_token=page_token)
            page = await self._answer(self._stub.ListSessions, request)
            page_token = page.next_page_token
            yield [session_summary_from_pb(summary) for summary in page.sessions], bool(page_token)
            if not page_token:
                return

    async def drain(self, endpoint: str) -> DrainOrder:
        """Returns when the order is given, not when it is carried out."""
        response = await self._answer(self._stub.Drain, admin_pb2.DrainRequest(endpoint=endpoint))
        return DrainOrder(response.shared, response.num_sessions)

    async def undrain(self, endpoint: str) -> bool:
        """Whether other orchestrators see it."""
        return (await self._answer(self._stub.Undrain, admin_pb2.UndrainRequest(endpoint=endpoint))).shared

    async def kill(self, session_id: str) -> bool:
        """Ends a session and deletes its record; False where this orchestrator serves none of that name."""
        return (await self._answer(self._stub.KillSession, admin_pb2.KillSessionRequest(session_id=session_id))).found

    async def _answer(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]", request: "Request"
    ) -> "Response":
        try:
            return await method(request, timeout=_CALL_TIMEOUT_S, metadata=self._token_metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    def _read(self, message: admin_pb2.ClusterStatus) -> ClusterStatus:
        try:
            return cluster_status_from_pb(message)
        except SpecdecError as error:  # the server's fault, not bad input of ours
            raise SpecdecError(f"{self._endpoint} sent a status that makes no sense: {error.message}") from error
