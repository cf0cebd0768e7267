"""AdminService on the wire: what people and tools ask. Protobuf in, a look or one call, protobuf out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from orchestrator.cluster import Cluster
from orchestrator.drains import Drains
from orchestrator.sessions import Sessions
from orchestrator.status import cluster_status, session_page
from orchestrator.store_health import StoreHealth
from specdec.errors import InvalidParameterError
from specdec.params import validate_session_id
from specdec.v1 import admin_pb2 as pb
from specdec.v1.admin_pb2_grpc import AdminServiceServicer
from specdec.wire.convert import duration_from_pb
from specdec.wire.convert.cluster import cluster_status_to_pb, session_summary_to_pb

_DEFAULT_INTERVAL_S = 1.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0
_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(AdminServiceServicer):
    def __init__(self, sessions: Sessions, cluster: Cluster, store_health: StoreHealth, drains: Drains) -> None:
        self._sessions = sessions
        self._cluster = cluster
        self._store_health = store_health
        self._drains = drains

    async def GetClusterStatus(  # noqa: N802 - the name of the RPC
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        return pb.GetClusterStatusResponse(status=self._cluster_status())

    async def WatchClusterStatus(  # noqa: N802 - the name of the RPC
        self, request: pb.WatchClusterStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchClusterStatusResponse]:
        interval_s = _DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval_s = duration_from_pb(request.interval, "interval")
        if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
            told = f"interval: {_MIN_INTERVAL_S} s to {_MAX_INTERVAL_S:.0f} s"
            raise InvalidParameterError(told, field="interval")
        while True:
            yield pb.WatchClusterStatusResponse(status=self._cluster_status())
            await asyncio.sleep(interval_s)

    async def ListSessions(  # noqa: N802 - the name of the RPC
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        if not 0 <= request.page_size <= _MAX_PAGE_SIZE:
            raise InvalidParameterError(f"page_size: in [0, {_MAX_PAGE_SIZE}]", field="page_size")
        if request.page_token:
            _require_session_id(request.page_token, "page_token")
        page_size = request.page_size or _DEFAULT_PAGE_SIZE
        page, has_more = session_page(self._sessions, after=request.page_token, size=page_size)
        return pb.ListSessionsResponse(
            sessions=[session_summary_to_pb(summary) for summary in page],
            next_page_token=page[-1].session_id if has_more else "",
        )

    async def Drain(  # noqa: N802 - the name of the RPC
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        order = await self._drains.order(request.endpoint, drained=True)
        return pb.DrainResponse(shared=order.shared, num_sessions=order.num_sessions)

    async def Undrain(  # noqa: N802 - the name of the RPC
        self, request: pb.UndrainRequest, context: Context
    ) -> pb.UndrainResponse:
        order = await self._drains.order(request.endpoint, drained=False)
        return pb.UndrainResponse(shared=order.shared)

    async def KillSession(  # noqa: N802 - the name of the RPC
        self, request: pb.KillSessionRequest, context: Context
    ) -> pb.KillSessionResponse:
        _require_session_id(request.session_id, "session_id")
        return pb.KillSessionResponse(found=await self._sessions.kill(request.session_id))

    def _cluster_status(self) -> pb.ClusterStatus:
        status = cluster_status(
            self._drains.own_endpoint,
            self._sessions,
            self._cluster,
            store_healthy=self._store_health.reachable,
            drains_shared=self._drains.shared,
        )
        return cluster_status_to_pb(status)


def _require_session_id(value: str, field: str) -> None:
    try:
        validate_session_id(value)
    except InvalidParameterError:
        raise InvalidParameterError(f"{field}: no session has such an id", field=field) from None
