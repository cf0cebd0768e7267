"""A gRPC server as every role runs it: health, reflection, limits, TLS, the interceptors and an orderly end.

Knows nothing of the services that it carries.
"""

from collections.abc import Callable
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.config import WireSettings, format_endpoint, is_loopback, parse_endpoint
from specdec.wire.certificates import CertificateFiles
from specdec.wire.gate import Gate, GateInterceptor
from specdec.wire.interceptors import ErrorInterceptor
from specdec.wire.padding import PaddingInterceptor

Servicer = TypeVar("Servicer")


class GrpcServer:
    """Binds at `start`, answers NOT_SERVING until `set_serving`, and NOT_SERVING again from `stop` on.

    Args:
        certificates: with them the server speaks TLS; where they have authorities it asks for the caller's as well.
        gate: asked about every call; None: everyone may call everything.
        insecure_bind: allows addresses other than loopback without certificates.
        with_reflection: tells tools what the services look like.

    Raises ValueError for an address other than loopback without certificates and `insecure_bind`.
    """

    def __init__(
        self,
        listen: str,
        *,
        wire: WireSettings | None = None,
        insecure_bind: bool = False,
        certificates: CertificateFiles | None = None,
        gate: Gate | None = None,
        with_reflection: bool = True,
    ) -> None:
        wire = wire or WireSettings()
        if not (insecure_bind or certificates or is_loopback(listen)):
            raise ValueError(f"{listen} can be reached from other machines; that needs TLS or insecure_bind")
        self._listen = listen
        self._certificates = certificates
        self._with_reflection = with_reflection
        self._service_names = [health.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[
                *([GateInterceptor(gate)] if gate is not None else []),
                ErrorInterceptor(),
                *([PaddingInterceptor(wire.pad_messages_to_bytes)] if wire.pad_messages_to_bytes else []),
            ],
            options=[
                ("grpc.so_reuseport", 0),  # else two servers share a port and neither knows
                ("grpc.max_receive_message_length", wire.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", wire.max_concurrent_streams),
                ("grpc.max_metadata_size", wire.max_metadata_bytes),
                ("grpc.absolute_max_metadata_size", wire.max_metadata_bytes),  # as hard as soft, else chance decides
                ("grpc.max_allowed_incoming_connections", wire.max_connections),
                ("grpc.server_handshake_timeout_ms", round(wire.handshake_timeout_s * 1000)),
                ("grpc.keepalive_time_ms", round(wire.keepalive_time_s * 1000)),
                ("grpc.keepalive_timeout_ms", round(wire.keepalive_timeout_s * 1000)),
                ("grpc.http2.ping_timeout_ms", round(wire.keepalive_timeout_s * 1000)),  # see channel.py
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", round(wire.min_ping_interval_s * 1000)),
            ],
            compression=grpc.Compression.NoCompression,
        )

    def add(
        self,
        add_to_server: Callable[[Servicer, grpc.aio.Server], None],
        servicer: Servicer,
        service: ServiceDescriptor,
    ) -> None:
        """Carries a service; `add_to_server` is the generated add_..._to_server."""
        add_to_server(servicer, self._server)
        self._service_names.append(service.full_name)

    async def start(self) -> str:
        """Binds and listens. Returns host:port, with the port that was taken; raises OSError where it cannot be had."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._with_reflection:
            reflection.enable_server_reflection([*self._service_names, reflection.SERVICE_NAME], self._server)
        await self._set_health(serving=False)
        host, port = parse_endpoint(self._listen)
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(format_endpoint(host, port))
            else:
                credentials = self._certificates.server_credentials()
                port = self._server.add_secure_port(format_endpoint(host, port), credentials)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self._listen}: the port is taken or the host is not this machine"
            ) from error
        await self._server.start()
        return format_endpoint(host, port)

    async def set_serving(self) -> None:
        """Health answers SERVING from now on."""
        await self._set_health(serving=True)

    async def set_not_serving(self) -> None:
        """Health answers NOT_SERVING from now on; calls are still taken."""
        await self._set_health(serving=False)

    async def stop(self, grace_s: float) -> None:
        """Health answers NOT_SERVING, new calls are refused, running ones may end by themselves for `grace_s`, then are
        cancelled. Returns when all have ended."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _set_health(self, *, serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for name in ("", *self._service_names):
            await self._health.set(name, answer.SERVING if serving else answer.NOT_SERVING)
