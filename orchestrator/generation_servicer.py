"""GenerationService on the wire: protobuf in, one call, protobuf out."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from orchestrator.cluster import Cluster
from orchestrator.sessions import Sessions
from orchestrator.status import models_served, own_status
from specdec.v1 import generation_pb2 as pb
from specdec.v1.generation_pb2_grpc import GenerationServiceServicer
from specdec.wire.convert import (
    generation_event_to_pb,
    generation_spec_from_pb,
    model_info_to_pb,
    server_status_to_pb,
)
from specdec.wire.stalled_reader import unless_stalled
from specdec.wire.tenant import tenant_of_call

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    def __init__(self, sessions: Sessions, cluster: Cluster, *, stall_s: float) -> None:
        """`stall_s`: a client that takes nothing for so long loses its stream."""
        self._sessions = sessions
        self._cluster = cluster
        self._stall_s = stall_s

    async def Generate(  # noqa: N802 - the name of the RPC
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        spec, tenant = generation_spec_from_pb(request.spec), tenant_of_call(context)
        frames = self._sessions.generate(request.session_id, spec, tenant, context.time_remaining())
        taken = unless_stalled(frames, context, "Generate", stall_s=self._stall_s)
        async with contextlib.aclosing(taken):
            async for frame in taken:
                yield pb.GenerateResponse(event=generation_event_to_pb(frame))

    async def Resume(  # noqa: N802 - the name of the RPC
        self, request: pb.ResumeRequest, context: Context
    ) -> AsyncIterator[pb.ResumeResponse]:
        spec = generation_spec_from_pb(request.spec) if request.HasField("spec") else None
        tenant = tenant_of_call(context)
        time_left_s = context.time_remaining()
        frames = self._sessions.resume(request.session_id, request.received_token_ids, spec, tenant, time_left_s)
        taken = unless_stalled(frames, context, "Resume", stall_s=self._stall_s)
        async with contextlib.aclosing(taken):
            async for frame in taken:
                yield pb.ResumeResponse(event=generation_event_to_pb(frame))

    async def Cancel(  # noqa: N802 - the name of the RPC
        self, request: pb.CancelRequest, context: Context
    ) -> pb.CancelResponse:
        tenant = tenant_of_call(context)
        return pb.CancelResponse(found=await self._sessions.cancel(request.session_id, tenant))

    async def GetStatus(  # noqa: N802 - the name of the RPC
        self, request: pb.GenerationServiceGetStatusRequest, context: Context
    ) -> pb.GenerationServiceGetStatusResponse:
        return pb.GenerationServiceGetStatusResponse(
            status=server_status_to_pb(own_status(self._sessions)),
            models=[model_info_to_pb(model) for model in models_served(self._cluster)],
        )
