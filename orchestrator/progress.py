"""What one session has come to, whichever verifier decided it: committed tokens, counts, and what its client was told.

Outlives verifiers and epochs. Pure: no socket, no store, no clock. Makes the client's frames and the record's
checkpoint out of what verifiers say, and refuses what does not follow.
"""

import dataclasses

from orchestrator.claim import Claim
from orchestrator.prefix import TokenPrefix
from orchestrator.record import Checkpoint, CommittedRound
from specdec.ids import Epoch
from specdec.messages import (
    Commit,
    Delta,
    Finished,
    GenerationEvent,
    Opened,
    PromptLogprobs,
    RoundStatistics,
    SessionEvent,
    SessionFinished,
    Started,
    Usage,
)
from specdec.params import FinishReason, GenerationSpec
from specdec.session import (
    Bumped,
    OwnEvent,
    Reclaimed,
    Session,
    SessionPhase,
    UnexpectedEventError,
    VerifierGone,
    apply,
)

_NO_ROUND = RoundStatistics(0, 0, None, 0.0, 0.0, 0.0)
"""Of tokens that an earlier epoch's rounds decided."""


class Progress:
    """One object per client's stream; every event of the session passes through it.

    Each method that takes an event raises UnexpectedEventError for one that cannot follow.
    """

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        unread = claim.unread_prompt_of
        prompt_length = claim.prompt_length if unread is None else unread.prompt_length
        received_token_ids = claim.committed_token_ids[claim.prompt_length :]
        self._prefix = TokenPrefix(claim.committed_token_ids if unread is None else ())
        self._behind_prompt = () if unread is None else received_token_ids
        """Output that waits for its prompt to be read."""
        self._untold: tuple[int, ...] = ()
        """Behind the prefix: decided by an earlier epoch, and without a text yet. A client that had them and was cut
        off before their text came would never get it."""
        self._opened: Opened | None = None
        self._end_of_told_prompt_logprobs = 1
        self._numerics_fingerprint = claim.numerics_fingerprint
        self._numerics_changed = False
        self.num_failovers = 0
        """How often another verifier took it since the stream began."""
        self.has_streamed = False
        """Whether a verifier decided anything since the stream began."""
        self.session = Session(
            claim.session_id,
            Epoch(0),
            claim.owner_nonce,
            prompt_length=prompt_length,
            committed_length=prompt_length + len(received_token_ids),
        )

    @property
    def was_opened(self) -> bool:
        """Whether a verifier ever took it for this stream: an owner that is fenced after that never comes back."""
        return self._opened is not None

    @property
    def has_output(self) -> bool:
        """Whether any is committed, of this stream or of those before it."""
        return self.session.committed_length > self.session.prompt_length

    @property
    def opened(self) -> Opened:
        """The last verifier's."""
        if self._opened is None:
            raise UnexpectedEventError("asked before Opened")
        return self._opened

    @property
    def spec_in_force(self) -> GenerationSpec:
        """The request as a verifier took it, the prompt as its tokens: the next one's defaults change nothing."""
        spec = self._claim.spec
        if self._opened is None:
            return spec
        return dataclasses.replace(
            spec,
            prompt=tuple(self._opened.prompt_token_ids),
            model=self._opened.model,
            sampling=dataclasses.replace(spec.sampling, acceptance_rule=self._opened.acceptance_rule),
            stop=dataclasses.replace(spec.stop, max_new_tokens=self._opened.max_new_tokens),
        )

    def claim_now(self) -> Claim:
        """What the next verifier is to be asked for.

        Before any output it is the request as at first, so that log-probabilities of the prompt are told, with the
        prompt's tokens as they were read.
        """
        if self._opened is None:
            return self._claim
        return dataclasses.replace(
            self._claim,
            spec=self.spec_in_force,
            committed_token_ids=self._prefix.snapshot() if self.has_output else (),
            prompt_length=self.session.prompt_length if self.has_output else 0,
            numerics_fingerprint=self._numerics_fingerprint,
            recorded_token_ids=self._untold,
            recorded_epoch=self._opened.kept_epoch if self._untold else Epoch(0),
            placement=None,
            unread_prompt_of=None,
        )

    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and output as they are committed and told now."""
        return self._prefix.snapshot()

    def apply(self, event: SessionEvent | OwnEvent) -> None:
        """An event that brings the client nothing."""
        self.session = apply(self.session, event)

    def enter_epoch(self, epoch: Epoch) -> None:
        """The owner claimed anew, or goes on in a higher epoch after it lost its verifier."""
        if self.session.phase is SessionPhase.BUMPED:
            self.apply(VerifierGone())  # nobody took it in the last one
        self.apply(Reclaimed(epoch) if self.session.phase is SessionPhase.CLAIMED else Bumped(epoch))

    def begin(self, opened: Opened) -> list[GenerationEvent]:
        """The frames for `Opened`: Started where it is the stream's first."""
        prompt = tuple(opened.prompt_token_ids)
        if len(self._prefix) > 0 and self._prefix.snapshot()[: self.session.prompt_length] != prompt:
            raise UnexpectedEventError("opened with another prompt than the session's")
        self.apply(opened)
        frames: list[GenerationEvent] = []
        fingerprint = opened.numerics.fingerprint
        self._numerics_changed |= self._numerics_fingerprint not in ("", fingerprint)
        self._numerics_fingerprint = fingerprint
        if self._opened is None:
            frames.append(self._started(opened))
        else:
            self.num_failovers += 1
        self._opened = opened
        if len(self._prefix) == 0:
            self._prefix.extend((*prompt, *self._behind_prompt))
        self._untold = tuple(opened.kept_token_ids)
        return frames

    def commit(self, commit: Commit, drafter: str) -> tuple[CommittedRound, Delta]:
        """What the record and what the client gets of a round; the client with tokens that had no text before it."""
        self.apply(commit)
        self.has_streamed = True
        untold = self._take_untold()
        self._prefix.extend(commit.token_ids)
        committed = CommittedRound(
            round=commit.round,
            base_position=commit.base_position,
            token_ids=commit.token_ids,
            prefix_digest=self._prefix.digest(),
            verifier_cached_length=commit.cached_length,
            drafter_cached_length=self.session.drafter_cached_length,
            drafter=drafter,
        )
        delta = Delta(
            text=commit.text,
            token_ids=(*untold, *commit.token_ids),
            position=commit.base_position - len(untold),
            round=commit.statistics,
            token_texts=() if untold else commit.token_texts,
            logprobs=commit.logprobs,
            sample_index=self._claim.sample_index,
        )
        return committed, delta

    def prompt_logprobs(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """What of it the client was not told yet, by a verifier that is lost."""
        self.apply(event)
        num_told = max(self._end_of_told_prompt_logprobs - event.start_position, 0)
        untold = tuple(event.logprobs)[num_told:]
        if not untold:
            return None
        start_position = event.start_position + num_told
        self._end_of_told_prompt_logprobs = start_position + len(untold)
        return PromptLogprobs(start_position, untold)

    def finish(self, event: SessionFinished) -> list[GenerationEvent]:
        """The last frames of an output that ended by itself."""
        self.apply(event)
        position = len(self._prefix)
        untold = self._take_untold()
        if not untold:
            return [self._finished(event.reason, event.usage, event.text)]
        rest = Delta(event.text, untold, position, _NO_ROUND, sample_index=self._claim.sample_index)
        return [rest, self._finished(event.reason, event.usage, "")]

    def cancelled(self) -> Finished:
        """The last frame of one that was cancelled."""
        return self._finished(FinishReason.CANCELLED, self.session.usage, "")

    def checkpoint(self, verifier: str, drafter: str) -> Checkpoint:
        session = self.session
        decided = TokenPrefix((*self._prefix.snapshot(), *self._untold)) if self._untold else self._prefix
        return Checkpoint(
            session_id=session.session_id,
            epoch=session.epoch,
            owner_nonce=session.owner_nonce,
            round=session.round,
            request=self.spec_in_force,
            model=self.opened.model,
            numerics_fingerprint=self._numerics_fingerprint,
            verifier=verifier,
            drafter=drafter,
            prompt_length=session.prompt_length,
            verifier_cached_length=session.verifier_cached_length,
            drafter_cached_length=session.drafter_cached_length,
            prefix_digest=decided.digest(),
            token_ids=decided.snapshot(),
            tenant=self._claim.tenant,
            sample_index=self._claim.sample_index,
        )

    def _take_untold(self) -> tuple[int, ...]:
        untold, self._untold = self._untold, ()
        self._prefix.extend(untold)
        return untold

    def _started(self, opened: Opened) -> Started:
        return Started(
            session_id=self._claim.session_id,
            model=opened.model,
            seed=self._claim.spec.sampling.seed or 0,
            acceptance_rule=opened.acceptance_rule,
            num_prompt_tokens=self.session.prompt_length,
            numerics_fingerprint=opened.numerics.fingerprint,
        )

    def _finished(self, reason: FinishReason, usage: Usage, text: str) -> Finished:
        return Finished(
            reason,
            usage,
            self.session.speculative,
            text,
            self._claim.sample_index,
            num_failovers=self.num_failovers,
            numerics_changed=self._numerics_changed,
        )
