"""The orchestrator's ends of its calls to verifiers and drafters: typed messages in and out, a deadline on each.

The one room here that knows stubs and protobuf besides the servicers. Raises specdec.errors; decides nothing.
"""

import abc
import asyncio
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, TypeVar, cast

import grpc.aio
from grpc_health.v1 import health_pb2

from specdec.config import WireSettings
from specdec.ids import AttachmentId, SessionId
from specdec.messages import AttachSession, OpenSession, ServerStatus, SessionEvent
from specdec.messages.cluster import Role
from specdec.v1 import drafter_pb2, verifier_pb2
from specdec.v1.drafter_pb2_grpc import DrafterServiceStub
from specdec.v1.verifier_pb2_grpc import VerifierServiceStub
from specdec.wire.certificates import CertificateFiles
from specdec.wire.channel import RoleChannel
from specdec.wire.convert import (
    attach_session_to_pb,
    open_session_to_pb,
    server_status_from_pb,
    session_event_from_pb,
)
from specdec.wire.interceptors import error_from_rpc

Response = TypeVar("Response")

_MAX_RECONNECT_BACKOFF_S = 0.3
"""A server that comes up is to be seen at once, and there are few enough of them to ask often."""


class Peer(abc.ABC):
    """One server: its channel, its health and its status."""

    role: ClassVar[Role]

    def __init__(self, endpoint: str, wire: WireSettings, certificates: CertificateFiles | None = None) -> None:
        self.endpoint = endpoint
        quick = wire.model_copy(update={"max_reconnect_backoff_s": _MAX_RECONNECT_BACKOFF_S})
        self._channel = RoleChannel(endpoint, self.role, quick, certificates)

    async def is_serving(self, timeout_s: float) -> bool:
        """What grpc.health.v1 says of the whole server. Raises DeadlineError, PeerUnavailableError."""
        check = self._channel.current().unary_unary(  # the generated HealthStub has no types
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            response = await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    @abc.abstractmethod
    async def get_status(self, timeout_s: float) -> ServerStatus:
        """What the server says of itself."""

    async def close(self) -> None:
        await self._channel.close()


class VerifierPeer(Peer):
    role = Role.VERIFIER

    def _stub(self) -> VerifierServiceStub:
        return VerifierServiceStub(self._channel.current())

    async def get_status(self, timeout_s: float) -> ServerStatus:
        try:
            response = await self._stub().GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return server_status_from_pb(response.status)

    async def open_session(
        self, request: OpenSession, timeout_s: float | None = None
    ) -> AsyncGenerator[SessionEvent, None]:
        """The session's events until the verifier ends it. Closing the iterator cancels the session's rows there.

        It lives as long as the session, `timeout_s` at most, of which the verifier knows: keepalive finds a dead peer,
        the caller sets the deadline for the first event.
        """
        call = self._stub().OpenSession(open_session_to_pb(request), timeout=timeout_s)
        try:
            while (response := await _read(call)) is not None:
                yield session_event_from_pb(response.event)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()


class DrafterPeer(Peer):
    role = Role.DRAFTER

    def _stub(self) -> DrafterServiceStub:
        return DrafterServiceStub(self._channel.current())

    async def get_status(self, timeout_s: float) -> ServerStatus:
        try:
            response = await self._stub().GetStatus(drafter_pb2.DrafterServiceGetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return server_status_from_pb(response.status)

    async def attach_session(self, request: AttachSession, timeout_s: float) -> None:
        """Returns once the verifier has taken the drafter; raises what drafter or verifier refused it with."""
        try:
            await self._stub().AttachSession(attach_session_to_pb(request), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def detach_session(self, session_id: SessionId, attachment_id: AttachmentId, timeout_s: float) -> None:
        """Returns once the drafter has left, or was not there. Raises DeadlineError, PeerUnavailableError."""
        request = drafter_pb2.DetachSessionRequest(session_id=session_id, attachment_id=attachment_id)
        try:
            await self._stub().DetachSession(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


async def _read(call: "grpc.aio.UnaryStreamCall[Any, Response]") -> Response | None:
    """The next message, None at the stream's end. Cancelled, it leaves a read that ends once the call is cancelled.

    What gRPC allocates for a read that is itself cancelled is never freed.
    """
    reading = asyncio.ensure_future(call.read())  # gRPC holds on to it
    reading.add_done_callback(_forget)
    message = await asyncio.shield(reading)
    return None if message is grpc.aio.EOF else cast(Response, message)


def _forget(reading: "asyncio.Future[Any]") -> None:
    """An error of a read that nobody waits for any more is nobody's."""
    if not reading.cancelled():
        reading.exception()
