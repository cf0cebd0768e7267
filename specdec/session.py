"""A session as the orchestrator runs it. Pure: `apply(session, event) -> session`, no clock, no socket, no tokens.

    CLAIMED --Opened--> OPENED --Commit--> STREAMING --SessionFinished--> FINISHED
       |                  |                   |
       |                  +------ClientGone---+-----> DETACHED   the record waits for a Resume
       |                  +------VerifierGone-+-----> DETACHED
       +--Reclaimed--> CLAIMED (a higher epoch)
    any but the last three --Fenced--> FENCED   another owner has the session; this one never writes again

Tokens themselves stay with whoever streams them; here are the counts that must agree at every step.
"""

import dataclasses
from enum import Enum

from specdec.ids import Epoch, Round, SessionId
from specdec.messages import (
    AttachmentChange,
    AttachmentState,
    Commit,
    Draining,
    Fenced,
    Opened,
    PromptLogprobs,
    RoundStatistics,
    SessionEvent,
    SessionFinished,
    SpeculativeStatistics,
    Usage,
)
from specdec.params import FinishReason


class SessionPhase(Enum):
    CLAIMED = "CLAIMED"  # owned, no verifier has taken it yet
    OPENED = "OPENED"  # a verifier has taken it, nothing is committed in this epoch
    STREAMING = "STREAMING"
    FINISHED = "FINISHED"
    DETACHED = "DETACHED"  # nobody is served; it may be resumed
    FENCED = "FENCED"


ENDED_PHASES = frozenset({SessionPhase.FINISHED, SessionPhase.DETACHED, SessionPhase.FENCED})


class UnexpectedEventError(Exception):
    """An event that the session's phase does not allow, or whose round or position does not follow the last one."""


@dataclasses.dataclass(frozen=True)
class Reclaimed:
    """The claim was made again, before anything was opened."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class ClientGone:
    """The client's stream is closed, on purpose or not."""


@dataclasses.dataclass(frozen=True)
class VerifierGone:
    """The verifier's stream ended without SessionFinished."""


OwnEvent = Reclaimed | ClientGone | VerifierGone


@dataclasses.dataclass(frozen=True)
class Session:
    """Positions count the prompt. A resumed session begins with its prompt_length and committed_length."""

    session_id: SessionId
    epoch: Epoch
    owner_nonce: bytes
    phase: SessionPhase = SessionPhase.CLAIMED
    round: Round = dataclasses.field(default=Round(0))
    prompt_length: int = 0
    committed_length: int = 0
    verifier_cached_length: int = 0
    drafter_cached_length: int = 0
    """What the attached drafter's last verified draft proves that it has computed; 0 without a drafter."""
    speculative: SpeculativeStatistics = dataclasses.field(default_factory=SpeculativeStatistics)
    """Sums over this epoch's rounds. Dropped and refused drafts are known to the verifier alone."""
    finish_reason: FinishReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.committed_length - self.prompt_length)


def apply(session: Session, event: SessionEvent | OwnEvent) -> Session:
    """The session after an event; raises UnexpectedEventError for one that cannot follow."""
    if session.phase in ENDED_PHASES:
        raise UnexpectedEventError(f"{type(event).__name__} after {session.phase.value}")
    match event:
        case Reclaimed():
            _require(session.phase is SessionPhase.CLAIMED, "reclaimed after Opened")
            _require(event.epoch > session.epoch, "the epoch must rise")
            return dataclasses.replace(session, epoch=event.epoch)
        case Opened():
            return _opened(session, event)
        case PromptLogprobs():
            return _with_prompt_logprobs(session, event)
        case Commit():
            return _committed(session, event)
        case SessionFinished():
            _require(session.phase is not SessionPhase.CLAIMED, "finished before Opened")
            return dataclasses.replace(session, phase=SessionPhase.FINISHED, finish_reason=event.reason)
        case Fenced():
            return dataclasses.replace(session, phase=SessionPhase.FENCED)
        case ClientGone() | VerifierGone():
            return dataclasses.replace(session, phase=SessionPhase.DETACHED)
        case AttachmentChange():
            if event.state is AttachmentState.DETACHED:
                return dataclasses.replace(session, drafter_cached_length=0)
            return session
        case Draining():
            return session


def _opened(session: Session, opened: Opened) -> Session:
    _require(session.phase is SessionPhase.CLAIMED, "opened twice")
    prompt_length = len(opened.prompt_token_ids)
    _require(prompt_length > 0, "opened without a prompt")
    _require(session.prompt_length in (0, prompt_length), "another prompt than the session's")
    return dataclasses.replace(
        session,
        phase=SessionPhase.OPENED,
        prompt_length=prompt_length,
        committed_length=max(session.committed_length, prompt_length) + len(opened.kept_token_ids),
    )


def _with_prompt_logprobs(session: Session, event: PromptLogprobs) -> Session:
    _require(session.phase is SessionPhase.OPENED, "log-probabilities of the prompt before Opened or after a commit")
    end_position = event.start_position + len(event.logprobs)
    _require(1 <= event.start_position < end_position <= session.prompt_length, "not positions of the prompt")
    return session


def _committed(session: Session, commit: Commit) -> Session:
    _require(session.phase in (SessionPhase.OPENED, SessionPhase.STREAMING), "a commit before Opened")
    _require(commit.round == session.round + 1, f"round {commit.round} after {session.round}")
    _require(
        commit.base_position == session.committed_length,
        f"a commit at {commit.base_position} where {session.committed_length} are committed",
    )
    _require(len(commit.token_ids) > 0, "a commit without tokens")
    _require(len(commit.logprobs) in (0, len(commit.token_ids)), "log-probabilities of other tokens than the commit's")
    statistics = commit.statistics
    drafter_cached_length = session.drafter_cached_length
    if statistics.num_draft_tokens > 0:
        # A drafter never forwards its last draft token before it knows the outcome.
        proven = min(statistics.num_accepted_tokens, statistics.num_draft_tokens - 1)
        drafter_cached_length = commit.base_position + proven
    return dataclasses.replace(
        session,
        phase=SessionPhase.STREAMING,
        round=commit.round,
        committed_length=session.committed_length + len(commit.token_ids),
        verifier_cached_length=commit.cached_length,
        drafter_cached_length=drafter_cached_length,
        speculative=_add_round(session.speculative, statistics),
    )


def _add_round(sums: SpeculativeStatistics, added: RoundStatistics) -> SpeculativeStatistics:
    return dataclasses.replace(
        sums,
        num_drafts=sums.num_drafts + (added.num_draft_tokens > 0),
        num_draft_tokens=sums.num_draft_tokens + added.num_draft_tokens,
        num_accepted_tokens=sums.num_accepted_tokens + added.num_accepted_tokens,
        num_accepted_tokens_per_pos=_count_places(sums.num_accepted_tokens_per_pos, added.num_accepted_tokens),
        num_draft_tokens_per_pos=_count_places(sums.num_draft_tokens_per_pos, added.num_draft_tokens),
        num_rounds=sums.num_rounds + 1,
        num_fallback_decodes=sums.num_fallback_decodes + added.fallback_decode,
    )


def _count_places(counts: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Adds one to each of the first num_tokens places."""
    if num_tokens == 0:
        return counts
    padded = counts + (0,) * (num_tokens - len(counts))
    return tuple(count + (place < num_tokens) for place, count in enumerate(padded))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnexpectedEventError(message)
