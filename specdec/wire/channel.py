"""Channels to servers of this system. One place for their options; who is called and when is not known here."""

import grpc.aio

from specdec.config import WireSettings, format_endpoint, parse_endpoint
from specdec.messages.cluster import Role
from specdec.wire.certificates import CertificateFiles, channel_credentials
from specdec.wire.role_identity import dns_name


def open_channel(
    endpoint: str,
    wire: WireSettings | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to host:port that connects on first use and again after every break.

    Calls made while there is no connection fail at once with UNAVAILABLE unless they ask `wait_for_ready`; each call
    sets its own deadline. Raises ValueError for what is not host:port.

    Args:
        credentials: of TLS; None: plaintext.
        server_name: what the server's certificate must name; None: the host of the endpoint.
    """
    wire = wire or WireSettings()
    target = format_endpoint(*parse_endpoint(endpoint))
    options = _options(wire)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options, compression=grpc.Compression.NoCompression)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(target, credentials, options, compression=grpc.Compression.NoCompression)


class RoleChannel:
    """The way to a server that must be of a role. Plaintext without `certificates`.

    Ask for `current()` at each call, and do not keep it: once the certificate files have changed that is a new channel,
    while calls on the one before run to their end.
    """

    def __init__(
        self, endpoint: str, role: Role, wire: WireSettings, certificates: CertificateFiles | None = None
    ) -> None:
        """Raises ValueError for what is not host:port."""
        self._endpoint = endpoint
        self._role = role
        self._wire = wire
        self._certificates = certificates
        self._shown = None if certificates is None else certificates.current()
        self._channel = self._open()

    def current(self) -> grpc.aio.Channel:
        if self._certificates is not None and (certificate := self._certificates.current()) is not self._shown:
            self._shown = certificate
            self._channel = self._open()  # the one before closes when its last call lets go of it
        return self._channel

    async def close(self) -> None:
        """Cancels the calls of the current channel."""
        await self._channel.close(grace=None)

    def _open(self) -> grpc.aio.Channel:
        if self._shown is None:
            return open_channel(self._endpoint, self._wire)
        return open_channel(self._endpoint, self._wire, channel_credentials(self._shown), dns_name(self._role))


def _options(wire: WireSettings) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_receive_message_length", wire.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # the receiver's limit rules, and tells the sender
        ("grpc.max_metadata_size", wire.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", wire.max_metadata_bytes),
        ("grpc.keepalive_time_ms", round(wire.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(wire.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(wire.keepalive_timeout_s * 1000)),  # without it: a minute
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # in truth how long one attempt may take; a busy peer needs a while
        ("grpc.max_reconnect_backoff_ms", round(wire.max_reconnect_backoff_s * 1000)),
        ("grpc.enable_retries", 0),  # retries are decided above, where an epoch can tell a repeated call
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_http_proxy", 0),  # a proxy meant for the web would break the streams
    ]
