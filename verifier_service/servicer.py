"""VerifierService on the wire: protobuf in, one command to the device's thread, events out as protobuf."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from grpc import aio

from specdec import PROTOCOL_VERSION, __version__
from specdec.errors import LoadingError, SpecdecError
from specdec.ids import AttachmentId, DraftSequence, SessionId
from specdec.messages import (
    Addressed,
    AttachRefusal,
    AttachRefused,
    Fenced,
    OpenSession,
    RefusalReason,
    Refused,
    ServerStatus,
    SessionEvent,
    SessionFinished,
)
from specdec.v1 import verifier_pb2 as pb
from specdec.v1.verifier_pb2_grpc import VerifierServiceServicer
from specdec.wire.convert import (
    open_session_from_pb,
    server_status_to_pb,
    session_event_to_pb,
    verify_request_from_pb,
    verify_response_to_pb,
)
from specdec.wire.stream_counts import StreamCounts
from verifier_service.attachment import DrafterStream
from verifier_service.mailbox import Mailbox

if TYPE_CHECKING:
    from verifier_service.target import Target

log = logging.getLogger(__name__)

SESSION_MAILBOX_CAPACITY = 1024
STREAM_MAILBOX_CAPACITY = 8192
MAX_COMMANDS_PER_STREAM = 64
"""Messages of one drafter that may wait for the device's thread; more are left in the connection."""

ServicerContext = aio.ServicerContext[Any, Any]


class VerifierServicer(VerifierServiceServicer):
    """Serves as soon as the process is up; answers LOADING until `target` is set."""

    def __init__(self, max_verify_streams_per_peer: int) -> None:
        self.target: Target | None = None
        self.draining = False
        self._verify_streams: set[Mailbox[Addressed]] = set()
        self._streams_of = StreamCounts(max_verify_streams_per_peer)

    def end_verify_streams(self) -> None:
        """Ends every drafter's stream after what is said already: a drafter keeps its stream open while it is idle."""
        for mailbox in self._verify_streams:
            mailbox.close()

    async def OpenSession(  # noqa: N802 - the name of the RPC
        self, request: pb.OpenSessionRequest, context: ServicerContext
    ) -> AsyncIterator[pb.OpenSessionResponse]:
        target = self._loaded()
        command = open_session_from_pb(request)
        command.spec.validated()
        prompt_token_ids = await _tokenise(target, command)
        mailbox: Mailbox[SessionEvent | SpecdecError] = Mailbox(SESSION_MAILBOX_CAPACITY)
        sink = target.device.sink(mailbox)
        target.device.submit(partial(target.engine.open_session, command, prompt_token_ids, sink))
        try:
            while True:
                event = await mailbox.get()
                if isinstance(event, SpecdecError):
                    raise event
                if event is None:
                    return
                yield pb.OpenSessionResponse(event=session_event_to_pb(event))
                if isinstance(event, SessionFinished | Fenced):
                    return
        finally:
            target.device.submit_release(partial(target.engine.close_session, command.session_id, sink))

    async def Verify(  # noqa: N802 - the name of the RPC
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: ServicerContext
    ) -> AsyncIterator[pb.VerifyResponse]:
        target = self._loaded()
        with self._streams_of.one_more(context.peer()):
            mailbox: Mailbox[Addressed] = Mailbox(STREAM_MAILBOX_CAPACITY)
            stream = DrafterStream(target.device.sink(mailbox))
            reader = asyncio.create_task(_read(target, stream, mailbox, request_iterator))
            self._verify_streams.add(mailbox)
            try:
                while (addressed := await mailbox.get()) is not None:
                    yield verify_response_to_pb(addressed)
                if reader.done():
                    reader.result()  # tells why it ended if it was not the drafter who ended it
            finally:
                self._verify_streams.discard(mailbox)
                reader.cancel()
                target.device.submit_release(partial(target.engine.drafters.stream_broken, stream))

    async def GetStatus(  # noqa: N802 - the name of the RPC
        self, request: pb.VerifierServiceGetStatusRequest, context: ServicerContext
    ) -> pb.VerifierServiceGetStatusResponse:
        target = self.target
        status = ServerStatus(
            serving=target is not None and not self.draining,
            draining=self.draining,
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
        )
        if target is not None:
            status = target.describe(status)
        return pb.VerifierServiceGetStatusResponse(status=server_status_to_pb(status))

    def _loaded(self) -> "Target":
        if self.target is None:
            raise LoadingError("the model is still being loaded", retry_after_s=1.0)
        return self.target


async def _tokenise(target: "Target", command: OpenSession) -> list[int]:
    """The prompt's token ids; none where the command's committed tokens begin with them."""
    if command.prompt_length > 0:
        return []
    target.tokenizer.require_short_enough(command.spec.prompt, target.info.context_limit)
    return await asyncio.to_thread(target.tokenizer.encode_prompt, command.spec.prompt)


async def _read(
    target: "Target", stream: DrafterStream, mailbox: Mailbox[Addressed], requests: AsyncIterator[pb.VerifyRequest]
) -> None:
    """Hands a drafter's messages to the device's thread until the drafter ends its half of the stream.

    Every draft that was handed over is answered before the stream ends.
    """
    credit = asyncio.Semaphore(MAX_COMMANDS_PER_STREAM)

    def receive(addressed: Addressed, arrived_at: float) -> None:
        try:
            target.engine.drafters.receive(stream, addressed, arrived_at)
        finally:
            target.device.post(credit.release)

    def end() -> None:
        target.engine.drafters.stream_broken(stream)
        target.device.post(mailbox.close)

    was_understood = True
    try:
        async for request in requests:
            try:
                addressed = verify_request_from_pb(request)
            except SpecdecError as error:
                if was_understood:  # how many more come is the drafter's choice, and a line for each would be, too
                    log.warning("a drafter's message was not understood: %s", error.message)
                was_understood = False
                answer = _unreadable(request, error)
                if answer is not None:
                    mailbox.put(answer)
                continue
            arrived_at = time.monotonic()
            await credit.acquire()
            target.device.submit(partial(receive, addressed, arrived_at))
    finally:
        target.device.submit_release(end)


def _unreadable(request: pb.VerifyRequest, error: SpecdecError) -> Addressed | None:
    """The answer to a message whose address or content cannot be read; None where it asks for no answer."""
    session_id, attachment_id = SessionId(request.session_id), AttachmentId(request.attachment_id)
    match request.WhichOneof("message"):
        case "draft":
            sequence = DraftSequence(request.draft.draft_sequence)
            refused = Refused(sequence, RefusalReason.UNKNOWN_ATTACHMENT, error.message, 0, (), 0)
            return Addressed(session_id, attachment_id, refused)
        case "attach":
            return Addressed(session_id, attachment_id, AttachRefused(AttachRefusal.UNKNOWN_SESSION, error.message))
        case _:
            return None
