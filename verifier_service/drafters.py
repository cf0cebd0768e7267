"""The engine's side of every attachment: who may draft for a session, and what each draft is answered.

Each Draft gets exactly one of Verdict, Dropped and Refused. A drafter is not trusted: everything that it sends is
checked here, and what is wrong harms its own session's speed alone.
"""

import dataclasses
import hmac
from collections.abc import Callable, Collection, Sequence

from specdec import PROTOCOL_VERSION
from specdec.attach_key import attach_key
from specdec.ids import AttachmentId, SessionId, digest_tokens
from specdec.messages import (
    Addressed,
    Advance,
    Attach,
    Attached,
    AttachmentChange,
    AttachmentState,
    AttachRefusal,
    AttachRefused,
    BudgetUpdate,
    Detach,
    Detached,
    DetachReason,
    Draft,
    Dropped,
    DropReason,
    RefusalReason,
    Refused,
    Verdict,
)
from specdec.params import AcceptanceRule, FinishReason
from verifier_service.alignment import check_message, num_right_tokens
from verifier_service.attachment import (
    MAX_REFUSED_DRAFTS,
    Attachment,
    AttachmentKey,
    DrafterStream,
    PendingDraft,
)
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SchedulerPolicy
from verifier_service.session import TargetLimits, VerifierSession
from verifier_service.vain_drafts import VainDrafts

MAX_PADDING_ROWS = 4096
"""Logit rows beyond the tokenizer's own that may pass for padding."""
MIN_TOKENS_TO_READ_ALONG = 32
"""What a drafter takes in at once costs it little more than one token; so it stays warm at next to no cost."""

BudgetMessage = Attached | Verdict | Advance | Dropped | Refused | BudgetUpdate


class Drafters:
    """All attachments of all sessions. Only the engine's thread calls it."""

    def __init__(
        self,
        find_session: Callable[[SessionId], VerifierSession | None],
        assign_budgets: Callable[[], None],
        tokenizer_fingerprint: str,
        target: TargetLimits,
        policy: SchedulerPolicy,
        max_attachments_per_stream: int,
        observer: EngineObserver,
        clock: Callable[[], float],
    ) -> None:
        self._find_session = find_session
        self._assign_budgets = assign_budgets
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._target = target
        self._policy = policy
        self._max_attachments_per_stream = max_attachments_per_stream
        self._observer = observer
        self._clock = clock
        self.num_changes = 0
        """Drafts that came and attachments that ended: for whom a step waits may be another after any of them."""
        self._drafted: set[AttachmentKey] = set()

    # --- From drafters -----------------------------------------------------------------------------------------------

    def receive(self, stream: DrafterStream, addressed: Addressed, arrived_at: float | None = None) -> None:
        """Takes one message of a drafter's stream, which may have come while a forward ran: now unless it is said."""
        match addressed.message:
            case Attach() as attach:
                self._attach(stream, addressed.session_id, addressed.attachment_id, attach)
            case Draft() as draft:
                arrived_at = self._clock() if arrived_at is None else arrived_at
                self._draft(stream, addressed.session_id, addressed.attachment_id, draft, arrived_at)
            case Detach():
                attachment = stream.attachments.get((addressed.session_id, addressed.attachment_id))
                if attachment is not None:
                    self._end(attachment, DetachReason.REQUESTED)

    def stream_broken(self, stream: DrafterStream) -> None:
        """Every attachment of the stream is over."""
        for attachment in list(stream.attachments.values()):
            self._end(attachment, DetachReason.STREAM_BROKEN)

    def _attach(
        self, stream: DrafterStream, session_id: SessionId, attachment_id: AttachmentId, attach: Attach
    ) -> None:
        session = self._find_session(session_id)
        refusal = self._refusal(stream, session, attachment_id, attach)
        if session is None or refusal is not None:
            refusal = refusal or AttachRefusal.UNKNOWN_SESSION
            stream.send(Addressed(session_id, attachment_id, AttachRefused(refusal, _refusal_text(refusal))))
            if session is not None and refusal is not AttachRefusal.BAD_KEY and session.is_news(attachment_id):
                session.last_refused_id = attachment_id
                session.sink(AttachmentChange(attachment_id, AttachmentState.REFUSED, refusal=refusal))
            return
        if session.attachment is not None:
            self._end(session.attachment, DetachReason.REPLACED)
        known = session.token_ids[: attach.known_length]
        start = attach.known_length if digest_tokens(known) == attach.known_digest else 0
        attachment = Attachment(
            session_id,
            attachment_id,
            session.epoch,
            stream,
            told_length=session.committed_length,
            draft_model=(attach.vocabulary_size, attach.context_limit),
            vain_drafts=VainDrafts(session.arrival),
        )
        stream.attachments[attachment.key] = attachment
        session.attachment = attachment
        session.last_attachment_id = attachment_id
        self._assign_budgets()
        self._send(
            attachment,
            Attached(
                committed_token_ids=session.token_ids[start:],
                start_position=start,
                seed=session.spec.sampling.seed if session.rule is AcceptanceRule.COUPLED else None,
                draft_budget=_budget(session),
            ),
        )
        session.sink(AttachmentChange(attachment_id, AttachmentState.ATTACHED))

    def _refusal(
        self, stream: DrafterStream, session: VerifierSession | None, attachment_id: AttachmentId, attach: Attach
    ) -> AttachRefusal | None:
        if session is None:
            return AttachRefusal.UNKNOWN_SESSION
        padding_limit = max(self._target.vocabulary_size, self._target.num_real_tokens + MAX_PADDING_ROWS)
        wrong_tokenizer = attach.tokenizer_fingerprint not in ("", self._tokenizer_fingerprint)
        wrong_vocabulary = attach.vocabulary_size != 0 and not (
            self._target.num_real_tokens <= attach.vocabulary_size <= padding_limit
        )
        checks = (
            (
                not hmac.compare_digest(attach.attach_key, attach_key(session.attach_secret, attachment_id)),
                AttachRefusal.BAD_KEY,
            ),
            (attach.epoch != session.epoch, AttachRefusal.STALE_EPOCH),
            (attach.protocol_version != PROTOCOL_VERSION, AttachRefusal.PROTOCOL_VERSION),
            (session.spec.speculation.disabled, AttachRefusal.SPECULATION_DISABLED),
            (attachment_id <= session.last_attachment_id, AttachRefusal.STALE_ATTACHMENT),
            (wrong_tokenizer, AttachRefusal.TOKENIZER_MISMATCH),
            (wrong_vocabulary, AttachRefusal.VOCABULARY_MISMATCH),
            (
                attach.context_limit != 0 and attach.context_limit <= session.committed_length,
                AttachRefusal.CONTEXT_TOO_SHORT,
            ),
            (not 0 <= attach.known_length <= session.committed_length, AttachRefusal.BAD_KNOWN_LENGTH),
            (attach.wants_hidden_states, AttachRefusal.NO_HIDDEN_STATES),
            (len(stream.attachments) >= self._max_attachments_per_stream, AttachRefusal.TOO_MANY_ATTACHMENTS),
        )
        return next((refusal for failed, refusal in checks if failed), None)

    def _draft(
        self,
        stream: DrafterStream,
        session_id: SessionId,
        attachment_id: AttachmentId,
        draft: Draft,
        arrived_at: float,
    ) -> None:
        self.num_changes += 1
        attachment = stream.attachments.get((session_id, attachment_id))
        session = self._find_session(session_id)
        if attachment is None or session is None or session.attachment is not attachment:
            if stream.had((session_id, attachment_id)):
                self._observer.draft_dropped(DropReason.STALE_ATTACHMENT)
                dropped = Dropped(draft.draft_sequence, DropReason.STALE_ATTACHMENT, 0, (), 0)
                stream.send(Addressed(session_id, attachment_id, dropped))
            else:
                reason = RefusalReason.UNKNOWN_ATTACHMENT
                self._refuse(stream, session_id, attachment_id, None, draft, reason, "no such attachment")
            return
        refusal = check_message(draft, session.rule, self._target.vocabulary_size)
        if refusal is not None:
            self._refuse(stream, session_id, attachment_id, attachment, draft, refusal, "the draft breaks a rule")
            return
        asked_at = attachment.asked_at if attachment.asked_at is not None else attachment.last_told_at
        latency_s = None if asked_at is None else max(0.0, arrived_at - asked_at)
        if latency_s is not None:  # a drafter cannot have drafted for longer than it was silent
            draft = dataclasses.replace(draft, draft_time_s=min(draft.draft_time_s, latency_s))
        pending = PendingDraft(draft, arrived_at, None if latency_s is None else latency_s - draft.draft_time_s)
        if draft.epoch != attachment.epoch:
            self.drop(session, pending, DropReason.STALE_EPOCH)
        elif draft.draft_sequence <= attachment.last_sequence:
            self.drop(session, pending, DropReason.DUPLICATE)
        else:
            attachment.last_sequence = draft.draft_sequence
            if draft.draft_token_ids:
                self._drafted.add(attachment.key)
            superseded, attachment.pending = attachment.pending, pending
            if attachment.asked_at is not None and latency_s is not None:
                attachment.delivers = latency_s <= self._policy.wait_s(session)
                attachment.observe_latency(latency_s)
            attachment.asked_at = None
            if superseded is not None:
                self.drop(session, superseded, DropReason.SUPERSEDED)

    def take_drafted(self) -> Collection[AttachmentKey]:
        """Attachments from which drafts with tokens came since this was asked last, of use or not."""
        drafted, self._drafted = self._drafted, set()
        return drafted

    # --- To drafters -------------------------------------------------------------------------------------------------

    def drop_pending(self, session: VerifierSession, pending: PendingDraft, reason: DropReason) -> None:
        """Answers the draft that waits, which turned out to be of no use."""
        if session.attachment is not None:
            session.attachment.pending = None
            session.attachment.num_useless += 1
            if reason.is_late:
                session.attachment.observe_accepted(num_right_tokens(pending.draft, session.token_ids))
        self.drop(session, pending, reason)

    def drop(self, session: VerifierSession, pending: PendingDraft, reason: DropReason) -> None:
        """Answers a draft that is of no use, with what its drafter needs next."""
        attachment = session.attachment
        session.tally.num_stale_drafts += 1
        self._observer.draft_dropped(reason)
        if attachment is not None:
            dropped = Dropped(
                draft_sequence=pending.draft.draft_sequence,
                reason=reason,
                committed_length=session.committed_length,
                missing_token_ids=_untold(session, attachment),
                draft_budget=_budget(session),
            )
            self._send(attachment, dropped)

    def answer_round(
        self,
        session: VerifierSession,
        answers: PendingDraft | None,
        base_position: int,
        accepted_node_indices: Sequence[int],
        num_draft_tokens: int,
        num_accepted_tokens: int,
        finish_reason: FinishReason | None,
    ) -> None:
        """Tells a session's drafter what a round committed: Verdict where its draft was in it, else Advance.

        One that has no budget reads along in chunks, not round by round.
        """
        attachment = session.attachment
        if attachment is None:
            return
        attachment.num_useless = 0
        budget = _budget(session)
        only_reads = answers is None and finish_reason is None and attachment.told_budget == 0 == budget
        if only_reads and session.committed_length - attachment.told_length < MIN_TOKENS_TO_READ_ALONG:
            return
        untold = _untold(session, attachment)
        if answers is None:
            advance = Advance(session.round, base_position, untold, session.committed_length, budget, finish_reason)
            self._send(attachment, advance)
            return
        attachment.pending = None
        if num_draft_tokens > 0 or not answers.draft.draft_token_ids:  # else nobody looked whether it was right
            # What was committed before it came was right too: it says what the next one brings if it is waited for.
            attachment.observe_accepted(base_position - answers.draft.start_position + num_accepted_tokens)
        verdict = Verdict(
            draft_sequence=answers.draft.draft_sequence,
            round=session.round,
            base_position=base_position,
            num_accepted_tokens=num_accepted_tokens,
            committed_token_ids=untold,
            committed_length=session.committed_length,
            draft_budget=budget,
            accepted_node_indices=accepted_node_indices,
            finish_reason=finish_reason,
        )
        self._send(attachment, verdict)

    def tell_budget(self, session: VerifierSession) -> None:
        """Tells a drafter that it may draft again, or may not, where no answer to a round will tell it in time."""
        attachment, budget = session.attachment, _budget(session)
        if attachment is None or attachment.told_budget is None:
            return
        if (attachment.told_budget > 0) == (budget > 0):
            return
        base_position = attachment.told_length
        if budget > 0 and base_position < session.committed_length:  # what it was not told while it had none
            untold = _untold(session, attachment)
            self._send(attachment, Advance(session.round, base_position, untold, session.committed_length, budget))
        else:
            self._send(attachment, BudgetUpdate(budget))

    def end_session(self, session: VerifierSession) -> None:
        """The session is over, and so is its attachment."""
        if session.attachment is not None:
            self._end(session.attachment, DetachReason.SESSION_ENDED)

    def _end(self, attachment: Attachment, reason: DetachReason) -> None:
        self.num_changes += 1
        session = self._find_session(attachment.session_id)
        if session is not None and session.attachment is attachment:
            if attachment.pending is not None:
                ended = reason is DetachReason.SESSION_ENDED
                reason_to_drop = DropReason.SESSION_ENDED if ended else DropReason.DETACHED
                self.drop_pending(session, attachment.pending, reason_to_drop)
            session.attachment = None
            session.draft_budget = 0
            session.sink(AttachmentChange(attachment.attachment_id, AttachmentState.DETACHED, detach_reason=reason))
        attachment.stream.end(attachment)
        attachment.stream.send(Addressed(attachment.session_id, attachment.attachment_id, Detached(reason)))

    def _refuse(
        self,
        stream: DrafterStream,
        session_id: SessionId,
        attachment_id: AttachmentId,
        attachment: Attachment | None,
        draft: Draft,
        reason: RefusalReason,
        message: str,
    ) -> None:
        self._observer.draft_refused(reason)
        session = None if attachment is None else self._find_session(session_id)
        if session is None or attachment is None:
            refused = Refused(draft.draft_sequence, reason, message, 0, (), 0)
            stream.send(Addressed(session_id, attachment_id, refused))
            return
        session.tally.num_refused_drafts += 1
        attachment.num_refused += 1
        attachment.delivers = False
        untold = _untold(session, attachment)
        budget = _budget(session)
        self._send(attachment, Refused(draft.draft_sequence, reason, message, session.committed_length, untold, budget))
        if attachment.num_refused >= MAX_REFUSED_DRAFTS:
            self._end(attachment, DetachReason.MISBEHAVED)

    def _send(self, attachment: Attachment, message: BudgetMessage) -> None:
        attachment.told_budget = message.draft_budget
        attachment.last_told_at = self._clock()
        if message.draft_budget == 0:
            attachment.asked_at = None
        elif attachment.asked_at is None:
            attachment.asked_at = attachment.last_told_at
        attachment.stream.send(Addressed(attachment.session_id, attachment.attachment_id, message))


def _budget(session: VerifierSession) -> int:
    """What is of use of the session's budget: no draft reaches beyond the output's limit."""
    return max(0, min(session.draft_budget, session.num_tokens_left - 1))


def _untold(session: VerifierSession, attachment: Attachment) -> Sequence[int]:
    untold = session.token_ids[attachment.told_length :]
    attachment.told_length = session.committed_length
    return untold


def _refusal_text(refusal: AttachRefusal) -> str:
    return {
        AttachRefusal.TOKENIZER_MISMATCH: "drafter and target have different tokenizers",
        AttachRefusal.VOCABULARY_MISMATCH: "the drafter's vocabulary is not the target's, give or take padding",
        AttachRefusal.CONTEXT_TOO_SHORT: "the drafter's context is shorter than what is committed",
        AttachRefusal.NO_HIDDEN_STATES: "this verifier gives no hidden states",
    }.get(refusal, refusal.value.lower().replace("_", " "))
