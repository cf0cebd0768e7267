"""AdminService on the wire: what people and tools ask. Protobuf in, a look or one call, protobuf out."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView, Role
from orchestrator.session_runner import SessionRunner
from orchestrator.sessions import Sessions
from orchestrator.status import own_status
from orchestrator.store_health import StoreHealth
from specdec.errors import InvalidParameterError
from specdec.v1 import admin_pb2 as pb
from specdec.v1.admin_pb2_grpc import AdminServiceServicer
from specdec.wire.convert import duration_from_pb, duration_to_pb, server_status_to_pb, timestamp_to_pb

_DEFAULT_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.1
_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000
_ROLES = {
    Role.VERIFIER: pb.ROLE_VERIFIER,
    Role.DRAFTER: pb.ROLE_DRAFTER,
    Role.ORCHESTRATOR: pb.ROLE_ORCHESTRATOR,
}

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(AdminServiceServicer):
    """`own_endpoint` is set once the server is bound."""

    def __init__(self, sessions: Sessions, cluster: Cluster, store_health: StoreHealth) -> None:
        self._sessions = sessions
        self._cluster = cluster
        self._store_health = store_health
        self.own_endpoint = ""

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
        if interval_s < _MIN_INTERVAL_S:
            raise InvalidParameterError(f"interval: at least {_MIN_INTERVAL_S} s", field="interval")
        while True:
            yield pb.WatchClusterStatusResponse(status=self._cluster_status())
            await asyncio.sleep(interval_s)

    async def ListSessions(  # noqa: N802 - the name of the RPC
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        if not 0 <= request.page_size <= _MAX_PAGE_SIZE:
            raise InvalidParameterError(f"page_size: in [0, {_MAX_PAGE_SIZE}]", field="page_size")
        page_size = request.page_size or _DEFAULT_PAGE_SIZE
        later = sorted(name for name in self._sessions.running if name > request.page_token)
        page = later[:page_size]
        return pb.ListSessionsResponse(
            sessions=[_summary(self._sessions.running[name]) for name in page],
            next_page_token=page[-1] if len(later) > page_size else "",
        )

    async def Drain(  # noqa: N802 - the name of the RPC
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        self._set_drained(request.endpoint, drained=True)
        return pb.DrainResponse()

    async def Undrain(  # noqa: N802 - the name of the RPC
        self, request: pb.UndrainRequest, context: Context
    ) -> pb.UndrainResponse:
        self._set_drained(request.endpoint, drained=False)
        return pb.UndrainResponse()

    async def KillSession(  # noqa: N802 - the name of the RPC
        self, request: pb.KillSessionRequest, context: Context
    ) -> pb.KillSessionResponse:
        found = self._sessions.is_running(request.session_id)
        if found:
            await self._sessions.cancel(request.session_id, tenant=None)
        return pb.KillSessionResponse(found=found)

    def _set_drained(self, endpoint: str, *, drained: bool) -> None:
        if endpoint == self.own_endpoint:
            self._sessions.draining = drained
        else:
            self._cluster.set_drained(endpoint, drained=drained)

    def _cluster_status(self) -> pb.ClusterStatus:
        own = EndpointView(
            self.own_endpoint,
            Role.ORCHESTRATOR,
            healthy=True,
            drained=self._sessions.draining,
            status=own_status(self._sessions),
        )
        views = [own, *self._cluster.verifiers, *self._cluster.drafters]
        return pb.ClusterStatus(
            endpoints=[_endpoint_to_pb(view) for view in views],
            taken_at=timestamp_to_pb(time.time()),
            store_healthy=self._store_health.reachable,
        )


def _endpoint_to_pb(view: EndpointView) -> pb.EndpointStatus:
    message = pb.EndpointStatus(
        endpoint=view.endpoint, role=_ROLES[view.role], healthy=view.healthy, drained=view.drained
    )
    if view.status is not None and view.healthy:
        message.status.CopyFrom(server_status_to_pb(view.status))
    if view.round_trip_time_s is not None:
        message.round_trip_time.CopyFrom(duration_to_pb(view.round_trip_time_s))
    return message


def _summary(runner: SessionRunner) -> pb.SessionSummary:
    session = runner.session
    return pb.SessionSummary(
        session_id=session.session_id,
        epoch=session.epoch,
        verifier_endpoint=runner.verifier,
        drafter_endpoint=runner.drafter,
        num_prompt_tokens=session.prompt_length,
        num_output_tokens=session.committed_length - session.prompt_length,
        opened_at=timestamp_to_pb(runner.opened_at_unix_s),
    )
