"""One attachment as a state machine: what is committed, what is pending, what may be sent. Pure: no stream, no clock.

Every message from the verifier brings the committed tokens that this drafter has not been told, so that after any of
them `committed_token_ids` is the verifier's own sequence; a message that does not fit raises OutOfStepError, and the
attachment is of no more use.
"""

import dataclasses
from collections.abc import Sequence

from drafter_service.proposers.base import Proposal
from specdec.ids import DraftSequence, common_prefix_length
from specdec.messages import (
    Advance,
    Attached,
    AttachSession,
    BudgetUpdate,
    Detached,
    DetachReason,
    Draft,
    Dropped,
    DropReason,
    Refused,
    Verdict,
    VerifierMessage,
)


class OutOfStepError(Exception):
    """The verifier's message does not continue what it said before."""


@dataclasses.dataclass(frozen=True)
class PendingDraft:
    """A draft that was sent and not answered yet.

    `sent_at` is in the caller's own clock.
    """

    draft: Draft
    proposal: Proposal
    sent_at: float


@dataclasses.dataclass(frozen=True)
class DraftOutcome:
    """What became of a draft.

    Attributes:
        pending: the draft.
        answer: how it was answered.
        num_judged_tokens: how many of its first tokens were found right or wrong, in a round or by what was committed
            before it came; those behind a wrong one are neither.
        num_right_tokens: how many of its first tokens are committed now.
    """

    pending: PendingDraft
    answer: Verdict | Dropped | Refused
    num_judged_tokens: int
    num_right_tokens: int

    @property
    def was_late(self) -> bool:
        """The verifier had committed other tokens, or all of the draft's, before it came."""
        return isinstance(self.answer, Dropped) and self.answer.reason.is_late


class Attachment:
    """State of one attachment, from the verifier's Attached on."""

    def __init__(self, request: AttachSession, attached: Attached) -> None:
        if attached.start_position > len(request.known_token_ids):
            raise OutOfStepError("attached beyond the tokens that this drafter knows")
        self.epoch = request.epoch
        self.committed_token_ids = [
            *request.known_token_ids[: attached.start_position],
            *attached.committed_token_ids,
        ]
        self.draft_budget = attached.draft_budget
        self.pending: PendingDraft | None = None
        self.detach_reason: DetachReason | None = None
        self._last_sequence = 0

    def snapshot(self) -> tuple[int, ...]:
        """The committed tokens as they are now. May be called from any thread: one call takes the whole list."""
        return tuple(self.committed_token_ids)

    @property
    def is_over(self) -> bool:
        """No draft will be of use any more."""
        return self.detach_reason is not None

    @property
    def may_draft(self) -> bool:
        """A draft may be sent now. May be called from any thread."""
        return not self.is_over and self.pending is None and self.draft_budget > 0

    def apply(self, message: VerifierMessage) -> DraftOutcome | None:
        """Takes a message of the verifier; returns what became of the pending draft where the message answers it.

        Raises OutOfStepError.
        """
        match message:
            case Verdict() | Advance():
                self._extend(message.committed_token_ids, message.committed_length)
                self.draft_budget = message.draft_budget
                if message.finish_reason is not None:
                    self.detach_reason = DetachReason.SESSION_ENDED
            case Dropped(reason=DropReason.STALE_ATTACHMENT) | Dropped(reason=DropReason.STALE_EPOCH):
                self.detach_reason = self.detach_reason or DetachReason.REPLACED
            case Dropped() | Refused():
                self._extend(message.missing_token_ids, message.committed_length)
                self.draft_budget = message.draft_budget
            case BudgetUpdate():
                self.draft_budget = message.draft_budget
            case Detached():
                self.detach_reason = message.reason
            case _:
                raise OutOfStepError(f"{type(message).__name__} does not belong to a running attachment")
        return self._answer(message) if isinstance(message, Verdict | Dropped | Refused) else None

    def _extend(self, token_ids: Sequence[int], committed_length: int) -> None:
        self.committed_token_ids.extend(token_ids)
        if len(self.committed_token_ids) != committed_length:
            raise OutOfStepError("committed length and the tokens told do not agree")

    def _answer(self, answer: Verdict | Dropped | Refused) -> DraftOutcome | None:
        pending = self.pending
        if pending is None or pending.draft.draft_sequence != answer.draft_sequence:
            return None  # an older draft that a newer one superseded
        self.pending = None
        # Compared here, not taken from the verdict: the verifier may have cut the draft, or used its tail alone.
        draft_token_ids = tuple(pending.draft.draft_token_ids)
        decided = tuple(self.committed_token_ids[pending.draft.start_position :])
        num_right = common_prefix_length(draft_token_ids, decided)
        found_wrong = num_right < min(len(draft_token_ids), len(decided))
        return DraftOutcome(pending, answer, num_right + found_wrong, num_right)

    def next_draft(self, proposal: Proposal, start_position: int, draft_time_s: float, now: float) -> Draft:
        """The draft to send, from here on pending: what the verifier has committed since, it finds out for itself.

        An empty proposal is sent for where the verifier stands now. Raises OutOfStepError.
        """
        if not self.may_draft:
            raise OutOfStepError("a draft is pending already, or none is wanted")
        self._last_sequence += 1
        draft = Draft(
            epoch=self.epoch,
            draft_sequence=DraftSequence(self._last_sequence),
            start_position=start_position if proposal.token_ids else len(self.committed_token_ids),
            draft_token_ids=proposal.token_ids,
            parent_indices=proposal.parent_indices,
            draft_probs=proposal.draft_probs,
            draft_time_s=draft_time_s,
        )
        self.pending = PendingDraft(draft, proposal, now)
        return draft
