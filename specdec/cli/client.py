"""A thin client of the orchestrator: typed messages in and out, a deadline on every call, faults as the error tree.

Knows GenerationService alone; `generate`, `demo` and `bench` use it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc

from specdec.cli.access import Access
from specdec.cli.connection import Connection
from specdec.errors import PeerUnavailableError, SpecdecError
from specdec.ids import SessionId
from specdec.messages import GenerationEvent, ModelInfo, ServerStatus
from specdec.params import GenerationSpec, validate_tenant
from specdec.v1 import generation_pb2, generation_pb2_grpc
from specdec.wire.convert.generation import generation_event_from_pb
from specdec.wire.convert.params import generation_spec_to_pb
from specdec.wire.convert.status import model_info_from_pb, server_status_from_pb
from specdec.wire.tenant import tenant_to_metadata

_SHORT_CALL_S = 10.0


class GenerationClient(Connection):
    """`async with GenerationClient("host:port") as client:`. One connection, any number of requests at once."""

    def __init__(
        self, endpoint: str, *, timeout_s: float = 600.0, tenant: str = "", access: Access | None = None
    ) -> None:
        """Needs a running event loop.

        Args:
            endpoint: of an orchestrator, as host:port.
            timeout_s: the longest that one output may take from request to last frame.
            tenant: whom the requests are for: servers are fair to tenants, not to requests. Where there are tokens, the
                token's tenant or none.
            access: TLS and token; None: neither.

        Raises:
            ValueError: `endpoint` is not host:port.
            InvalidParameterError: `tenant` is not empty and not 1 to 64 of [A-Za-z0-9_-].
        """
        tenant_metadata = tenant_to_metadata(validate_tenant(tenant))
        super().__init__(endpoint, access or Access())
        self._metadata = tenant_metadata + self._token_metadata
        self._timeout_s = timeout_s
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(self, spec: GenerationSpec, session_id: str = "") -> AsyncGenerator[GenerationEvent, None]:
        """One Started, PromptLogprobs where asked for, any number of Delta, one Finished for each sample.

        Closing the iterator ends the stream.

        Raises:
            SpecdecError: what the server refused or how it failed; PeerUnavailableError where none answers.
        """
        request = generation_pb2.GenerateRequest(spec=generation_spec_to_pb(spec), session_id=session_id)
        call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield self._event(response.event)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        finally:
            call.cancel()

    async def resume(
        self, session_id: SessionId, received_token_ids: Sequence[int], spec: GenerationSpec
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The rest of a stream that broke, for the tenant that it was for; raises as `generate` does.

        Each of several samples is resumed by itself: Started.sample_session_ids names their sessions.
        """
        request = generation_pb2.ResumeRequest(
            session_id=session_id, received_token_ids=received_token_ids, spec=generation_spec_to_pb(spec)
        )
        call = self._stub.Resume(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield self._event(response.event)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        finally:
            call.cancel()

    async def cancel(self, session_id: SessionId) -> bool:
        """Ends a session of this client's tenant, or all samples of a request; whether there was one."""
        try:
            request = generation_pb2.CancelRequest(session_id=session_id)
            return (await self._stub.Cancel(request, timeout=_SHORT_CALL_S, metadata=self._metadata)).found
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    async def status(self) -> tuple[ServerStatus, tuple[ModelInfo, ...]]:
        """Of the orchestrator, and the models that can be asked for now."""
        try:
            request = generation_pb2.GenerationServiceGetStatusRequest()
            response = await self._stub.GetStatus(request, timeout=_SHORT_CALL_S, metadata=self._token_metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        return server_status_from_pb(response.status), tuple(model_info_from_pb(model) for model in response.models)

    async def wait_for_model(self, timeout_s: float) -> ModelInfo:
        """The first model that can be asked for, once there is one; the last fault when the time is up."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                _, models = await self.status()
                if models:
                    return models[0]
                fault: SpecdecError = PeerUnavailableError(f"no model is served at {self._endpoint}")
            except SpecdecError as error:
                fault = error
            if asyncio.get_running_loop().time() > deadline:
                raise fault
            await asyncio.sleep(0.1)

    def _event(self, message: generation_pb2.GenerationEvent) -> GenerationEvent:
        try:
            return generation_event_from_pb(message)
        except SpecdecError as error:  # the server's fault, not bad input of ours
            raise SpecdecError(f"{self._endpoint} sent a frame that makes no sense: {error.message}") from error
