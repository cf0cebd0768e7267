"""One drafter's attachment to one session, and the stream that carries it. Knows no tokens' meaning and no model."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import Addressed, Draft

MAX_ATTACHMENTS_PER_STREAM = 1024
MAX_REMEMBERED_ATTACHMENTS = 4096
MAX_REFUSED_DRAFTS = 16
"""A drafter whose drafts break the protocol this often in one attachment is detached."""

AttachmentKey = tuple[SessionId, AttachmentId]


@dataclasses.dataclass(frozen=True)
class PendingDraft:
    """A well-formed draft that waits for its round."""

    draft: Draft
    arrived_at: float
    round_trip_time_s: float | None


@dataclasses.dataclass(eq=False)
class Attachment:
    """State of one attachment.

    `told_length` counts the committed tokens that the drafter knows, `told_budget` is the last budget it was told.
    `asked_at`: when it was first told something, and might draft, since its last draft. A round waits for a draft only
    while `delivers`: the last one came within the wait.
    """

    session_id: SessionId
    attachment_id: AttachmentId
    epoch: Epoch
    stream: "DrafterStream"
    told_length: int
    told_budget: int | None = None
    last_sequence: int = 0
    pending: PendingDraft | None = None
    delivers: bool = False
    num_refused: int = 0
    asked_at: float | None = None
    last_told_at: float | None = None

    @property
    def key(self) -> AttachmentKey:
        return (self.session_id, self.attachment_id)


class DrafterStream:
    """The verifier's end of one Verify stream: who is attached through it, and who was."""

    def __init__(self, send: Callable[[Addressed], None]) -> None:
        self.send = send
        self.attachments: dict[AttachmentKey, Attachment] = {}
        self._ended: OrderedDict[AttachmentKey, None] = OrderedDict()

    def end(self, attachment: Attachment) -> None:
        """Forgets an attachment but for the fact that it was there."""
        self.attachments.pop(attachment.key, None)
        self._ended[attachment.key] = None
        while len(self._ended) > MAX_REMEMBERED_ATTACHMENTS:
            self._ended.popitem(last=False)

    def had(self, key: AttachmentKey) -> bool:
        """Whether an attachment of this stream is over."""
        return key in self._ended
