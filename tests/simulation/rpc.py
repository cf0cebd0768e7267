"""gRPC's own surface over the made-up network: channels for the generated stubs, a server for the real servicers.

Bytes cross, so every conversion is real, and the servicers' failures go through the real interceptor. Deadlines,
cancelled calls and broken connections end as in grpc.aio. Flow control is left out: queues are as long as they need be.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from specdec.config import WireSettings
from specdec.wire.interceptors import ErrorInterceptor
from tests.simulation.network import Connection, Network
from tests.simulation.virtual_time import Process, current_process, running_world

FIRST_BACKOFF_S = 0.1
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
OK: Status = (grpc.StatusCode.OK, "", ())
UNAVAILABLE: Status = (grpc.StatusCode.UNAVAILABLE, "failed to connect", ())
CANCELLED: Status = (grpc.StatusCode.CANCELLED, "cancelled", ())


def own_process() -> Process:
    process = current_process()
    if process is None:
        raise RuntimeError("nobody's: calls are made by processes")
    return process


class ClientCall:
    """The caller's end of one call, of any of the four kinds."""

    def __init__(
        self, channel: "SimChannel", method: str, parse: Callable[[bytes], Any], timeout: float | None
    ) -> None:
        self._channel, self._method, self._parse = channel, method, parse
        self._process = own_process()
        self._loop = channel.network.loop
        self._connection: Connection | None = None
        self._unsent: list[Callable[[ServerCall], None]] = []
        self._server_call: ServerCall | None = None
        self._responses: deque[bytes] = deque()
        self._status: Status | None = None
        self._wake = asyncio.Event()
        self._deadline = None if timeout is None else self._loop.call_later(timeout, self._expire)
        self._opening = self._process.spawn(self._open(), f"call {method}")

    async def _open(self) -> None:
        connection = await self._channel.connection()
        if self._status is not None:
            return None
        server = None if connection is None else self._channel.network.servers.get(connection.server)
        if connection is None or server is None:
            return self._end(UNAVAILABLE)
        self._connection = connection
        connection.ends[self] = None
        self._server_call = ServerCall(server, connection, self, self._method)
        connection.send(self._process, self._server_call.start)
        unsent, self._unsent = self._unsent, []
        for act in unsent:
            self._send(act)
        return None

    def _send(self, act: "Callable[[ServerCall], None]") -> None:
        if self._server_call is None or self._connection is None:
            self._unsent.append(act)
        else:
            server_call = self._server_call
            self._connection.send(self._process, lambda: act(server_call))

    def _expire(self) -> None:
        if self._status is None:
            self._send(ServerCall.cancel)
            self._end((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            if self._deadline is not None:
                self._deadline.cancel()
            if self._connection is not None:
                self._connection.ends.pop(self, None)
            self._wake.set()

    def broken(self, reason: str) -> None:
        self._end((grpc.StatusCode.UNAVAILABLE, reason, ()))

    def receive(self, response: bytes) -> None:
        if self._status is None:
            self._responses.append(response)
            self._wake.set()

    def receive_status(self, status: Status) -> None:
        self._end(status)

    # --- What generated stubs' callers use ---------------------------------------------------------------------------

    def send(self, request: bytes) -> None:
        self._send(lambda call: call.receive(request))

    async def write(self, request: Any) -> None:
        if self._status is not None:
            raise self._error()
        self.send(self._serialize(request))

    async def done_writing(self) -> None:
        self._send(ServerCall.receive_end)

    async def read(self) -> Any:
        while not self._responses:
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self._error()
            self._wake.clear()
            await self._wake.wait()
        return self._parse(self._responses.popleft())

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    def __await__(self) -> Any:
        return self._only_response().__await__()

    async def _only_response(self) -> Any:
        try:
            response = await self.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is grpc.aio.EOF:
            raise _rpc_error((grpc.StatusCode.INTERNAL, "no response", ()))
        return response

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._send(ServerCall.cancel)
        self._end(CANCELLED)
        return True

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        raise NotImplementedError

    _serialize: Callable[[Any], bytes]

    def _error(self) -> BaseException:
        return asyncio.CancelledError() if self._status is CANCELLED else _rpc_error(self._status or UNAVAILABLE)


def _rpc_error(status: Status) -> grpc.aio.AioRpcError:
    code, details, trailing = status
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class ServerCall:
    """The servicer's end, and the context that it is given."""

    def __init__(self, server: "SimServer", connection: Connection, caller: ClientCall, method: str) -> None:
        self._server, self._connection, self._caller, self._method = server, connection, caller, method
        self._process = server.process
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._status: Status = OK
        self._is_over = False

    def start(self) -> None:
        self._server.calls[self] = None
        self._connection.ends[self] = None
        self._task = self._process.spawn(self._serve(), f"serve {self._method}")
        self._task.add_done_callback(lambda _: self._ended())

    def receive(self, request: bytes) -> None:
        self._requests.put_nowait(request)
        if self._server.network.is_duplicated(self._method):
            self._server.network.duplicates_left -= 1
            again = ServerCall(self._server, self._connection, self._caller, self._method)
            again._is_over = True  # what it answers is for nobody
            again.start()
            again._requests.put_nowait(request)

    def receive_end(self) -> None:
        self._requests.put_nowait(None)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def broken(self, reason: str) -> None:
        self._is_over = True
        self.cancel()

    def _ended(self) -> None:
        self._server.calls.pop(self, None)
        self._connection.ends.pop(self, None)

    async def _serve(self) -> None:
        handler = await self._server.handler(self._method)
        try:
            if handler is None:
                self._status = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
            elif handler.unary_unary is not None:
                self._respond(handler, await handler.unary_unary(await self._requests.get(), self))
            else:
                if handler.unary_stream is not None:
                    responses = handler.unary_stream(await self._requests.get(), self)
                else:
                    responses = handler.stream_stream(self._request_iterator(), self)
                async for response in responses:
                    self._respond(handler, response)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._status = CANCELLED
        except Exception as error:
            self._server.network.on_error(f"{self._process.name}: {self._method} raised {error!r}")
            self._status = (grpc.StatusCode.UNKNOWN, str(error), ())
        status = self._status
        self._to_caller(lambda: self._caller.receive_status(status))

    def _respond(self, handler: Any, response: Any) -> None:
        message = handler.response_serializer(response)
        self._to_caller(lambda: self._caller.receive(message))

    def _to_caller(self, deliver: Callable[[], None]) -> None:
        if not self._is_over:
            self._connection.send(self._process, deliver)

    async def _request_iterator(self) -> AsyncIterator[bytes]:
        while (request := await self._requests.get()) is not None:
            yield request

    # --- The context that servicers see ------------------------------------------------------------------------------

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return f"ipv4:{self._connection.client.name}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def time_remaining(self) -> float | None:
        return None

    async def send_initial_metadata(self, metadata: object) -> None: ...

    def set_trailing_metadata(self, metadata: object) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[Any] = ()) -> None:
        self._status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError("Locally aborted.")


class SimServer:
    """Stands in for specdec.wire.server.GrpcServer."""

    def __init__(self, listen: str, **_options: Any) -> None:
        self.process = own_process()
        self.network: RpcNetwork = running_world().network
        self._listen = listen
        self._handlers: dict[str, Any] = {}
        self._guarded: dict[str, Any] = {}
        self.calls: dict[ServerCall, None] = {}
        self.is_serving = False

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, _service: ServiceDescriptor) -> None:
        add_to_server(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods come once more, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self) -> str:
        async def check(_request: Any, _context: Any) -> health_pb2.HealthCheckResponse:
            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            return health_pb2.HealthCheckResponse(status=serving if self.is_serving else not_serving)

        self._guarded["/grpc.health.v1.Health/Check"] = grpc.unary_unary_rpc_method_handler(
            check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )
        self.network.listeners[self._listen] = self.process
        self.network.servers[self.process] = self
        self.network.look()
        return self._listen

    async def handler(self, method: str) -> Any:
        if method not in self._guarded:
            handler = self._handlers.get(method)

            async def continuation(_details: grpc.HandlerCallDetails) -> Any:
                return handler

            details: Any = _Details(method)
            self._guarded[method] = await ErrorInterceptor().intercept_service(continuation, details)
        return self._guarded[method]

    async def set_serving(self) -> None:
        self.is_serving = True

    async def set_not_serving(self) -> None:
        self.is_serving = False

    async def stop(self, grace_s: float) -> None:
        self.is_serving = False
        self.network.listeners.pop(self._listen, None)
        deadline = self.network.loop.now + grace_s
        while self.calls and self.network.loop.now < deadline:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(min(0.05, deadline - self.network.loop.now))
        for call in list(self.calls):
            call.cancel()
        await asyncio.sleep(0.01)
        for connection in list(self.network.connections):
            if connection.server is self.process:
                connection.close("server is gone")


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata: tuple[Any, ...] = ()


class RpcNetwork(Network):
    """The network, and what only calls need."""

    def __init__(self, loop: Any, on_error: Callable[[str], None]) -> None:
        super().__init__(loop)
        self.servers: dict[Process, SimServer] = {}
        self.on_error = on_error
        self.duplicates_left = 0

    def is_duplicated(self, method: str) -> bool:
        return self.duplicates_left > 0 and method.rpartition("/")[2] in ("AttachSession", "DetachSession", "Cancel")


class SimChannel:
    """What open_channel returns: connects when it is used, and again, with backoff, after every break."""

    def __init__(self, network: RpcNetwork, endpoint: str, wire: WireSettings) -> None:
        self.network, self._endpoint = network, endpoint
        self._keepalive_s = wire.keepalive_time_s + wire.keepalive_timeout_s
        self._max_backoff_s = wire.max_reconnect_backoff_s
        self._backoff_s = FIRST_BACKOFF_S
        self._not_before = 0.0
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._process = own_process()

    async def connection(self) -> Connection | None:
        """The open one, or a new one; None where it cannot be had now."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._connection is not None:  # it broke
            self._connection = None
        if self._connecting is None:
            if self.network.loop.now < self._not_before:
                return None
            self._connecting = self._process.spawn(self._connect(), f"connect {self._endpoint}")
        await asyncio.wait([self._connecting])
        return self._connection

    async def _connect(self) -> None:
        try:
            self._connection = await self.network.connect(self._process, self._endpoint, self._keepalive_s)
        finally:
            self._connecting = None
        if self._connection is not None:
            self._backoff_s, self._not_before = FIRST_BACKOFF_S, 0.0
        else:
            self._not_before = self.network.loop.now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, self._max_backoff_s)

    async def channel_ready(self) -> None:
        while await self.connection() is None:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(max(0.01, self._not_before - self.network.loop.now))

    async def close(self, grace: float | None = None) -> None:
        if self._connection is not None:
            self._connection.close("channel closed")

    async def __aenter__(self) -> "SimChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._unary_request(method, request_serializer, response_deserializer)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._unary_request(method, request_serializer, response_deserializer)

    def _unary_request(self, method: str, serialize: Any, parse: Any) -> Any:
        def call(request: Any, timeout: float | None = None, **_: Any) -> ClientCall:
            one = ClientCall(self, method, parse, timeout)
            one.send(serialize(request))
            return one

        return call

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(timeout: float | None = None, **_: Any) -> ClientCall:
            one = ClientCall(self, method, response_deserializer, timeout)
            one._serialize = request_serializer
            return one

        return call
