"""The error tree to google.rpc.Status and back, at one place on each side. Knows no service and no message.

Every error of the domain carries an ErrorInfo with the domain "specdec". What is not of the error tree is a fault of
ours: the caller is told INTERNAL and not a word more, the log has the traceback.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.errors import (
    DeadlineError,
    MalformedRequestError,
    MessageTooLargeError,
    NotOfferedError,
    PeerUnavailableError,
    SpecdecError,
)

ERROR_DOMAIN = "specdec"
MAX_MESSAGE_CHARS = 512
"""gRPC refuses trailers past 8 kB, and a message is for people."""
_STATUS_DETAILS_KEY = "grpc-status-details-bin"

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:  # the stubs make it generic, the library does not
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]

_log = structlog.get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status. The call's own cancellation and the handler's aborts pass through."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        # An unknown method has no handler, and grpc answers UNIMPLEMENTED.
        return None if handler is None else _guarded(handler, handler_call_details.method)


def _guarded(handler: Handler, method: str) -> Handler:
    """The same handler, with its failures mapped and its requests parsed here, so that garbage is mapped too."""
    behaviour = behaviour_of(handler)
    parse: Any = handler.request_deserializer

    def parsed(request: Any) -> Any:
        if handler.request_streaming:
            return _parsed_stream(request, parse)
        return _parsed(request, parse)

    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(parsed(request), context)
        except asyncio.CancelledError as leaked:
            if _is_being_cancelled():
                raise
            await abort(leaked, context, method)
        except Exception as error:
            await abort(error, context, method)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            # aclosing: a handler whose caller is gone ends now, not when it is collected.
            async with contextlib.aclosing(behaviour(parsed(request), context)) as responses:
                async for response in responses:
                    yield response
        except asyncio.CancelledError as leaked:
            if _is_being_cancelled():
                raise
            await abort(leaked, context, method)
        except Exception as error:
            await abort(error, context, method)

    # A handler that streams by context.write is a coroutine function like one that returns its only response.
    return handler_like(handler, stream if inspect.isasyncgenfunction(behaviour) else call, None)


def behaviour_of(handler: Handler) -> Any:
    """What a handler does, in whichever shape of call."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def handler_like(
    handler: Handler,
    behaviour: Any,
    parse: Callable[[bytes], Any] | None,
    serialize: Callable[[Any], bytes] | None = None,
) -> Handler:
    """A handler of the same shape of call, which does `behaviour` with what `parse` makes of each request.

    Without `serialize` responses are serialized as before.
    """
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    wrapped: Handler = make(
        behaviour, request_deserializer=parse, response_serializer=serialize or handler.response_serializer
    )
    return wrapped


def _parsed(request: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(request)
    except DecodeError as error:
        raise MalformedRequestError("the request is not the message that this method takes") from error


async def _parsed_stream(requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request, parse)


async def abort(error: Exception | asyncio.CancelledError, context: Context, method: str) -> None:
    """Ends a call with the status of an error, or with INTERNAL where the error is none of the tree."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = _as_known(error)
    if known is None:
        _log.error("unhandled_error", method=method, error=type(error).__name__, exc_info=error)
        known = SpecdecError("internal error")
    else:
        _log.info("request_failed", method=method, reason=known.reason)
    status = rpc_status.to_status(status_from_error(known))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _is_being_cancelled() -> bool:
    """Whether the call itself is. Of a cancellation that leaked from a task which the handler awaited, gRPC would tell
    the caller nothing, and let it wait."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _as_known(error: Exception | asyncio.CancelledError) -> SpecdecError | None:
    match error:
        case SpecdecError():
            return error
        case TimeoutError():
            return DeadlineError("a deadline passed")
        case grpc.aio.AioRpcError():
            return error_from_rpc(error)
        case _:
            return None


def status_from_error(error: SpecdecError) -> status_pb2.Status:
    """Code, message and ErrorInfo of an error, and RetryInfo where it says when to come again."""
    status = status_pb2.Status(
        code=grpc.StatusCode[error.status].value[0],
        message=error.message[:MAX_MESSAGE_CHARS],
    )
    metadata = {key: value[:MAX_MESSAGE_CHARS] for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_from_rpc(error: grpc.aio.AioRpcError) -> SpecdecError:
    """The error that the server raised.

    Where it raised none, what the transport says: a peer out of reach, a message too large, a deadline, an unknown
    method.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            told = _error_from_details(value)
            if told is not None:
                return told
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:  # a stopping server ends queued calls CANCELLED
            return PeerUnavailableError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:  # every limit of ours brings an ErrorInfo; the message limit is grpc's
            return MessageTooLargeError(details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return NotOfferedError(details)
        case _:
            return SpecdecError(details)


def _error_from_details(serialized: bytes) -> SpecdecError | None:
    try:
        status = status_pb2.Status.FromString(serialized)
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        retry_after_s = None
        for detail in status.details:
            if not detail.Unpack(info) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    except DecodeError:
        return None
    if info.domain != ERROR_DOMAIN:
        return None
    error_class = _CLASSES.get(info.reason, SpecdecError)
    error = error_class(status.message, retry_after_s=retry_after_s)
    error.metadata = dict(info.metadata)
    return error


_CLASSES = {
    error_class.reason: error_class for error_class in SpecdecError.__subclasses__() if "reason" in vars(error_class)
}
