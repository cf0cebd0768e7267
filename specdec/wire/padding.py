"""Messages filled up to a multiple of some bytes, so that their length does not tell how much is in them.

Nothing on the way shortens them again: gRPC's compression is off here, and TLS has none. What is hidden is the size of
a message; when it comes, and how many come, is not.
"""

from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from specdec.wire.interceptors import Continuation, Handler, behaviour_of, handler_like


class Paddable(Protocol):
    padding: bytes

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Length of the serialized message."""


Message = TypeVar("Message", bound=Paddable)
_MAX_LENGTH_PREFIX_BYTES = 5


def pad(message: Message, bucket_bytes: int) -> Message:
    """The same message, as long as the next multiple of `bucket_bytes` that padding can reach. 0 changes nothing.

    A field costs its tag and its length besides what is in it, so that one or two bytes, and a few counts more, cannot
    be filled; those go on to the multiple after.
    """
    if bucket_bytes == 0:
        return message
    message.padding = b""
    size = message.ByteSize()
    wanted = -size % bucket_bytes
    if wanted == 0:
        return message
    while (filling := _filling(wanted)) is None:
        wanted += bucket_bytes
    message.padding = bytes(filling)
    return message


def _filling(wanted: int) -> int | None:
    """Bytes in a field that lengthens a message by `wanted` bytes. Fields below 16 have a tag of one byte."""
    for prefix_bytes in range(1, _MAX_LENGTH_PREFIX_BYTES + 1):
        filling = wanted - 1 - prefix_bytes
        if filling > 0 and _varint_bytes(filling) == prefix_bytes:
            return filling
    return None


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


class PaddingInterceptor(grpc.aio.ServerInterceptor):
    """Fills up every response that has room for padding."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        serialize: Any = handler.response_serializer

        def padded(response: Any) -> bytes:
            message = pad(response, self._bucket_bytes) if hasattr(response, "padding") else response
            serialized: bytes = serialize(message)
            return serialized

        return handler_like(handler, behaviour_of(handler), handler.request_deserializer, padded)
