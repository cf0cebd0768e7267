"""One drafter's attachment to one session, and the stream that carries it. Knows no tokens' meaning and no model."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable

from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import Addressed, Draft
from verifier_service.vain_drafts import VainDrafts

MAX_REMEMBERED_ATTACHMENTS = 4096
MAX_REFUSED_DRAFTS = 16
"""A drafter whose drafts break the protocol this often in one attachment is detached."""
FIRST_ACCEPTED_PER_DRAFT = 1.0
ACCEPTED_GAIN = 0.15
LATENCY_GAIN = 0.25
MAX_SURPRISE, SURPRISE_S = 4.0, 0.001
"""No draft counts as later than so many times what was expected, and a little: drafters stall, none is too quick."""

AttachmentKey = tuple[SessionId, AttachmentId]
DraftModel = tuple[int, int]
"""What an attachment says of its drafter's model: rows of its vocabulary and its context limit, zeros if none."""


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
    `asked_at`: since when it has been told something, and might draft, without drafting. A round waits for a draft only
    while `delivers`: the last one came within the wait. `draft_latency_s` and `accepted_per_draft` are what its drafts
    took and brought, the newest counting most; `vain_drafts` says whether they are of use at all.
    """

    session_id: SessionId
    attachment_id: AttachmentId
    epoch: Epoch
    stream: "DrafterStream"
    told_length: int
    draft_model: DraftModel = (0, 0)
    told_budget: int | None = None
    last_sequence: int = 0
    pending: PendingDraft | None = None
    delivers: bool = False
    num_refused: int = 0
    num_useless: int = 0
    """Drafts of no use since the last round. An honest drafter has one at most: its answer says what is committed."""
    asked_at: float | None = None
    last_told_at: float | None = None
    draft_latency_s: float | None = None
    accepted_per_draft: float = FIRST_ACCEPTED_PER_DRAFT
    vain_drafts: VainDrafts = dataclasses.field(default_factory=VainDrafts)

    def observe_latency(self, latency_s: float) -> None:
        """A draft came so long after it could be made."""
        if self.draft_latency_s is None:
            self.draft_latency_s = latency_s
        else:
            believed_s = min(latency_s, MAX_SURPRISE * self.draft_latency_s + SURPRISE_S)
            self.draft_latency_s += LATENCY_GAIN * (believed_s - self.draft_latency_s)

    def observe_accepted(self, num_accepted_tokens: int) -> None:
        """A draft was judged: so many of its tokens were right."""
        self.accepted_per_draft += ACCEPTED_GAIN * (num_accepted_tokens - self.accepted_per_draft)

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
