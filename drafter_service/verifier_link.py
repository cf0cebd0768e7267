"""One verifier as the drafter knows it: its stream, the attachments on it, and what is measured there.

Routes what the verifier says to the loop that it is for; what goes wrong in one loop ends that loop alone.
"""

import asyncio
import dataclasses

import structlog

from drafter_service.draft_loop import DraftLoop
from drafter_service.shared_measurements import SharedMeasurements
from drafter_service.verify_client import AttachmentKey, VerifyClient
from specdec.config import WireSettings
from specdec.errors import PeerUnavailableError
from specdec.messages import (
    Addressed,
    Attach,
    Attached,
    AttachRefused,
    AttachSession,
    Detach,
    Detached,
    DetachReason,
    Draft,
    VerifierMessage,
)
from specdec.wire.certificates import CertificateFiles

log = structlog.get_logger(__name__)


@dataclasses.dataclass
class Entry:
    """One attachment: waiting for the verifier's answer, then a running loop.

    Attributes:
        answered: the answer to Attach, or why there is none.
        early: messages that came between that answer and the loop's start: a few at most.
    """

    request: AttachSession
    answered: "asyncio.Future[Attached | AttachRefused]"
    loop: DraftLoop | None = None
    task: "asyncio.Task[None] | None" = None
    early: list[VerifierMessage] = dataclasses.field(default_factory=list)

    def deliver(self, message: VerifierMessage) -> None:
        """Hands a message to the loop; a loop that cannot take it is ended."""
        if self.loop is None or self.task is None:
            self.early.append(message)
            return
        try:
            self.loop.receive(message)
        except Exception as error:
            log.warning("attachment_given_up", session_id=self.request.session_id, error=type(error).__name__)
            self.task.cancel()

    def start(self, loop: DraftLoop, task: "asyncio.Task[None]") -> None:
        """From here on messages go to the loop, those that came early first."""
        self.loop, self.task = loop, task
        early, self.early = self.early, []
        for message in early:
            self.deliver(message)


class VerifierLink:
    """The attachments at one endpoint. `num_joining` counts those that wait for a stream."""

    def __init__(self, endpoint: str, wire: WireSettings, certificates: CertificateFiles | None) -> None:
        self.entries: dict[AttachmentKey, Entry] = {}
        self.num_joining = 0
        self.measured = SharedMeasurements()
        self.client = VerifyClient(endpoint, self._route, self._drop_all, self._is_needed, wire, certificates)

    def leave(self, key: AttachmentKey) -> None:
        """Forgets an attachment and says so to the verifier, who ignores it where it knows already."""
        if self.entries.pop(key, None) is not None:
            try:
                self.client.send(*key, Detach())
            except PeerUnavailableError:
                return  # the stream's end says it too

    @property
    def is_alive(self) -> bool:
        """Whether there is a stream, or somebody needs one."""
        return self.client.is_alive or self._is_needed()

    def _is_needed(self) -> bool:
        return bool(self.entries) or self.num_joining > 0

    def _route(self, addressed: Addressed) -> None:
        entry = self.entries.get((addressed.session_id, addressed.attachment_id))
        message = addressed.message
        if entry is None or isinstance(message, Attach | Draft | Detach):
            return  # given up here before the verifier knew; the other direction's messages never come out of a stream
        if not isinstance(message, Attached | AttachRefused):
            entry.deliver(message)
        elif not entry.answered.done():
            entry.answered.set_result(message)

    def _drop_all(self) -> None:
        for entry in tuple(self.entries.values()):
            if entry.answered.done():
                entry.deliver(Detached(DetachReason.STREAM_BROKEN))
            else:
                entry.answered.set_exception(PeerUnavailableError("the stream to the verifier broke"))
