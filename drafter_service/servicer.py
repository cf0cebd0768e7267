"""DrafterService on the wire: protobuf in, one call, protobuf out."""

from drafter_service.drafter import Drafter
from specdec import PROTOCOL_VERSION, __version__
from specdec.errors import LoadingError
from specdec.ids import AttachmentId
from specdec.messages import Load, ServerStatus
from specdec.v1 import drafter_pb2 as pb
from specdec.v1.drafter_pb2_grpc import DrafterServiceServicer
from specdec.wire.convert import attach_session_from_pb, duration_to_pb, server_status_to_pb, session_id_from_pb
from specdec.wire.interceptors import Context


class DrafterServicer(DrafterServiceServicer):
    """Serves as soon as the process is up; answers LOADING until `drafter` is set."""

    def __init__(self, proposer_name: str) -> None:
        self.drafter: Drafter | None = None
        self._proposer_name = proposer_name

    async def AttachSession(  # noqa: N802 - the name of the RPC
        self, request: pb.AttachSessionRequest, context: Context
    ) -> pb.AttachSessionResponse:
        round_trip_time_s = await self._loaded().attach(attach_session_from_pb(request))
        return pb.AttachSessionResponse(round_trip_time=duration_to_pb(round_trip_time_s))

    async def DetachSession(  # noqa: N802 - the name of the RPC
        self, request: pb.DetachSessionRequest, context: Context
    ) -> pb.DetachSessionResponse:
        found = await self._loaded().detach(session_id_from_pb(request.session_id), AttachmentId(request.attachment_id))
        return pb.DetachSessionResponse(found=found)

    async def GetStatus(  # noqa: N802 - the name of the RPC
        self, request: pb.DrafterServiceGetStatusRequest, context: Context
    ) -> pb.DrafterServiceGetStatusResponse:
        drafter = self.drafter
        status = ServerStatus(
            serving=drafter is not None and not drafter.draining,
            draining=drafter is not None and drafter.draining,
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            model=None if drafter is None else drafter.model,
            load=Load() if drafter is None else drafter.load,
            proposer=self._proposer_name,
        )
        return pb.DrafterServiceGetStatusResponse(status=server_status_to_pb(status))

    def _loaded(self) -> Drafter:
        if self.drafter is None:
            raise LoadingError("the proposer is still being loaded", retry_after_s=1.0)
        return self.drafter
