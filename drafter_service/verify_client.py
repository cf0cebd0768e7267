"""The client half of Verify: one bidi stream for each verifier endpoint, shared by sessions. Pure routing.

Knows addresses and queues; refuses to know what a message means. A stream that breaks takes all its attachments with
it: the orchestrator attaches again, over the next stream. It is opened when somebody needs it, and again, with backoff,
for as long as somebody does.
"""

import asyncio
import random
from collections.abc import Callable

import grpc
import grpc.aio
import structlog

from specdec.config import WireSettings
from specdec.errors import PeerUnavailableError, SpecdecError
from specdec.ids import AttachmentId, SessionId
from specdec.messages import Addressed, DrafterMessage
from specdec.messages.cluster import Role
from specdec.v1 import verifier_pb2 as pb
from specdec.v1.verifier_pb2_grpc import VerifierServiceStub
from specdec.wire.certificates import CertificateFiles
from specdec.wire.channel import RoleChannel
from specdec.wire.convert import verify_request_to_pb, verify_response_from_pb
from specdec.wire.padding import pad

MAX_QUEUED_MESSAGES = 1024
FIRST_BACKOFF_S = 0.1
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

AttachmentKey = tuple[SessionId, AttachmentId]

log = structlog.get_logger(__name__)


class VerifyClient:
    """One verifier's stream.

    Args:
        on_message: takes what the verifier says. What it raises breaks the stream.
        on_broken: told that every attachment of the stream is gone.
        is_needed: whether anybody still wants a stream; asked before a reconnect.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[Addressed], None],
        on_broken: Callable[[], None],
        is_needed: Callable[[], bool],
        wire: WireSettings,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._on_message = on_message
        self._on_broken = on_broken
        self._is_needed = is_needed
        self._wire = wire
        self._certificates = certificates
        self._connected = asyncio.Event()
        self._outbox: asyncio.Queue[pb.VerifyRequest | None] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is a stream or one is being opened."""
        return self._task is not None and not self._task.done()

    async def connect(self, timeout_s: float) -> None:
        """Returns once there is a stream. Raises PeerUnavailableError after `timeout_s` without one, or where this
        client is closed."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"verify {self.endpoint}")
        connected = asyncio.ensure_future(self._connected.wait())
        try:
            await asyncio.wait((connected, self._task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connected.cancel()
        if not self._connected.is_set():
            raise PeerUnavailableError("the verifier cannot be reached", endpoint=self.endpoint)

    def send(self, session_id: SessionId, attachment_id: AttachmentId, message: DrafterMessage) -> None:
        """Queues a message. Raises PeerUnavailableError where there is no stream, or the verifier does not read it."""
        if not self._connected.is_set():
            raise PeerUnavailableError("the stream to the verifier is broken", endpoint=self.endpoint)
        try:
            request = verify_request_to_pb(Addressed(session_id, attachment_id, message))
            self._outbox.put_nowait(pad(request, self._wire.pad_messages_to_bytes))
        except asyncio.QueueFull:
            raise PeerUnavailableError("the verifier does not read its stream", endpoint=self.endpoint) from None

    async def close(self) -> None:
        """Sends what is queued, ends the stream and returns when it has ended."""
        if self._task is None:
            return
        if self._connected.is_set() and not self._outbox.full():
            self._outbox.put_nowait(None)
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        to_verifier = RoleChannel(self.endpoint, Role.VERIFIER, self._wire, self._certificates)
        try:
            while True:
                channel = to_verifier.current()
                try:
                    await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
                    backoff_s = FIRST_BACKOFF_S
                    await self._stream(channel)
                    log.info("verifier_stream_ended", verifier=self.endpoint)
                except TimeoutError:
                    log.info("verifier_unreachable", verifier=self.endpoint)
                except grpc.aio.AioRpcError as error:
                    log.info("verifier_stream_broken", verifier=self.endpoint, code=error.code().name)
                except SpecdecError as error:
                    log.warning("verifier_not_understood", verifier=self.endpoint, reason=error.reason)
                if not self._is_needed():
                    return
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects
                backoff_s = min(2 * backoff_s, self._wire.max_reconnect_backoff_s)
        finally:
            await to_verifier.close()

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        """One stream from its opening to its end. Raises AioRpcError when it breaks."""
        self._outbox = asyncio.Queue(MAX_QUEUED_MESSAGES)
        call = VerifierServiceStub(channel).Verify()
        writer = asyncio.create_task(_write(call, self._outbox))
        self._connected.set()
        try:
            async for response in call:
                self._on_message(verify_response_from_pb(response))
        finally:
            self._connected.clear()
            writer.cancel()
            call.cancel()
            await asyncio.wait([writer])
            self._on_broken()


async def _write(
    call: "grpc.aio.StreamStreamCall[pb.VerifyRequest, pb.VerifyResponse]",
    outbox: "asyncio.Queue[pb.VerifyRequest | None]",
) -> None:
    """Writes what is queued; None ends our half. A stream that broke ends it too: the reader says so."""
    try:
        while (request := await outbox.get()) is not None:
            await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
