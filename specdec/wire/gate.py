"""Who may call what, asked before a request is read. Knows when to ask; each server's gate knows the answer."""

import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from specdec.wire.interceptors import Context, Continuation, Handler, abort, behaviour_of, handler_like

HEALTH_PREFIX = "/grpc.health.v1.Health/"


class Gate(Protocol):
    def admit(self, method: str, context: Context) -> contextlib.AbstractContextManager[None]:
        """Lets a call of /package.Service/Method in for as long as the returned context lasts.

        Raises a SpecdecError, here or as the context is entered, where it is not let in.
        """


class GateInterceptor(grpc.aio.ServerInterceptor):
    """The outermost one: not a byte of a request is parsed before its caller was let in."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._gated(handler, handler_call_details.method)

    def _gated(self, handler: Handler, method: str) -> Handler:
        behaviour = behaviour_of(handler)

        async def call(request: Any, context: Context) -> Any:
            try:
                with self._gate.admit(method, context):
                    return await behaviour(request, context)
            except Exception as error:
                await abort(error, context, method)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._gate.admit(method, context):
                    async with contextlib.aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            yield response
            except Exception as error:
                await abort(error, context, method)

        gated = stream if inspect.isasyncgenfunction(behaviour) else call
        return handler_like(handler, gated, handler.request_deserializer)
