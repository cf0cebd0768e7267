"""Channels to servers of this system. One place for their options; who is called and when is not known here."""

import grpc.aio

from specdec.config import WireSettings, format_endpoint, parse_endpoint


def open_channel(endpoint: str, wire: WireSettings | None = None) -> grpc.aio.Channel:
    """A channel to host:port that connects on first use and again after every break.

    Calls made while there is no connection fail at once with UNAVAILABLE unless they ask `wait_for_ready`; each call
    sets its own deadline. Raises ValueError for what is not host:port.
    """
    wire = wire or WireSettings()
    return grpc.aio.insecure_channel(
        format_endpoint(*parse_endpoint(endpoint)),
        options=[
            ("grpc.max_receive_message_length", wire.max_message_bytes),
            ("grpc.max_send_message_length", -1),  # the receiver's limit rules, and tells the sender
            ("grpc.keepalive_time_ms", round(wire.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(wire.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            (
                "grpc.min_reconnect_backoff_ms",
                5000,
            ),  # in truth how long one attempt may take; a busy peer needs a while
            ("grpc.max_reconnect_backoff_ms", round(wire.max_reconnect_backoff_s * 1000)),
            ("grpc.enable_retries", 0),  # retries are decided above, where an epoch can tell a repeated call
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.enable_http_proxy", 0),  # a proxy meant for the web would break the streams
        ],
        compression=grpc.Compression.NoCompression,
    )
