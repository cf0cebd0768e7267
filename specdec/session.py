"""A session as the orchestrator runs it. Pure: `apply(session, event) -> session`, no clock, no socket, no tokens.

    CLAIMED --Opened--> OPENED --Commit--> STREAMING --SessionFinished--> FINISHED
                        ^    |                 |
                        |    +--VerifierGone---+--> LOST --Bumped--> BUMPED --+
                        +-------------------------------------Opened---------+

A client that is gone, or a session that no verifier takes, leads to DETACHED: the record waits for a Resume. Another
owner leads to FENCED: this one never writes again. NEXT_PHASE has every pair of phase and event that may meet, and
docs/sessions.md shows it as a table.

Tokens themselves stay with whoever streams them; here are the counts that must agree at every step.
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from itertools import zip_longest

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
    LOST = "LOST"  # its verifier is lost or was left; the epoch has to rise before another may take it
    BUMPED = "BUMPED"  # owned in a higher epoch, no verifier has taken it in this one
    FINISHED = "FINISHED"
    DETACHED = "DETACHED"  # nobody is served; it may be resumed
    FENCED = "FENCED"


class UnexpectedEventError(Exception):
    """An event that the session's phase does not allow, or whose round or position does not follow the last one."""


@dataclasses.dataclass(frozen=True)
class Reclaimed:
    """The claim was made again, before anything was opened."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class Bumped:
    """The same owner goes on in a higher epoch, with rounds counted from 0."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class VerifierGone:
    """The verifier's stream, or the attempt to open one, is over without SessionFinished. Also where the owner left a
    verifier that drains."""


@dataclasses.dataclass(frozen=True)
class ClientGone:
    """The client's stream is closed, on purpose or not."""


@dataclasses.dataclass(frozen=True)
class GaveUp:
    """No verifier takes the session."""


OwnEvent = Reclaimed | Bumped | VerifierGone | ClientGone | GaveUp

_P = SessionPhase
NEXT_PHASE: Mapping[type[SessionEvent | OwnEvent], Mapping[SessionPhase, SessionPhase]] = {
    Reclaimed: {_P.CLAIMED: _P.CLAIMED},
    Opened: {_P.CLAIMED: _P.OPENED, _P.BUMPED: _P.OPENED},
    PromptLogprobs: {_P.OPENED: _P.OPENED},
    Commit: {_P.OPENED: _P.STREAMING, _P.STREAMING: _P.STREAMING},
    AttachmentChange: {_P.OPENED: _P.OPENED, _P.STREAMING: _P.STREAMING},
    Draining: {_P.OPENED: _P.OPENED, _P.STREAMING: _P.STREAMING},
    SessionFinished: {_P.OPENED: _P.FINISHED, _P.STREAMING: _P.FINISHED},
    VerifierGone: {_P.CLAIMED: _P.CLAIMED, _P.OPENED: _P.LOST, _P.STREAMING: _P.LOST, _P.BUMPED: _P.LOST},
    Bumped: {_P.LOST: _P.BUMPED},
    # Before Opened a claim may be made again above the epoch that fenced it. Afterwards an owner never comes back.
    Fenced: {
        _P.CLAIMED: _P.CLAIMED,
        _P.OPENED: _P.FENCED,
        _P.STREAMING: _P.FENCED,
        _P.LOST: _P.FENCED,
        _P.BUMPED: _P.FENCED,
    },
    ClientGone: dict.fromkeys((_P.CLAIMED, _P.OPENED, _P.STREAMING, _P.LOST, _P.BUMPED), _P.DETACHED),
    GaveUp: dict.fromkeys((_P.CLAIMED, _P.LOST, _P.BUMPED), _P.DETACHED),
}
"""Where an event leads from each phase that it may come in. A pair that is not here is a broken contract."""


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
    num_untold_tokens: int = 0
    """At the end of committed_length: an earlier epoch decided them, their text comes with the next commit or the end,
    and until then no client sees them."""
    verifier_cached_length: int = 0
    drafter_cached_length: int = 0
    """What the attached drafter's last verified draft proves that it has computed; 0 without a drafter."""
    epoch_speculative: SpeculativeStatistics = dataclasses.field(default_factory=SpeculativeStatistics)
    """Sums over this epoch's rounds. Dropped and refused drafts are known to the verifier alone, which tells them with
    the session's end: those of a verifier that was lost are not counted."""
    earlier_speculative: SpeculativeStatistics = dataclasses.field(default_factory=SpeculativeStatistics)
    """The same over the epochs before, since the client's stream began."""
    finish_reason: FinishReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.committed_length - self.num_untold_tokens - self.prompt_length)

    @property
    def speculative(self) -> SpeculativeStatistics:
        """Sums over all epochs since the client's stream began."""
        return _add(self.earlier_speculative, self.epoch_speculative)


def apply(session: Session, event: SessionEvent | OwnEvent) -> Session:
    """The session after an event; raises UnexpectedEventError for one that cannot follow."""
    phase = NEXT_PHASE[type(event)].get(session.phase)
    if phase is None:
        raise UnexpectedEventError(f"{type(event).__name__} in {session.phase.value}")
    return dataclasses.replace(_counted(session, event), phase=phase)


def _counted(session: Session, event: SessionEvent | OwnEvent) -> Session:
    """The session with all but its phase as it is after the event."""
    match event:
        case Reclaimed():
            _require(event.epoch > session.epoch, "the epoch must rise")
            return dataclasses.replace(session, epoch=event.epoch)
        case Bumped():
            return _bumped(session, event)
        case Opened():
            return _opened(session, event)
        case PromptLogprobs():
            return _with_prompt_logprobs(session, event)
        case Commit():
            return _committed(session, event)
        case SessionFinished():
            return dataclasses.replace(
                session, finish_reason=event.reason, epoch_speculative=event.speculative, num_untold_tokens=0
            )
        case VerifierGone():  # what was not told is offered to the next one, and counts where that takes it
            told_length = session.committed_length - session.num_untold_tokens
            return dataclasses.replace(session, committed_length=told_length, num_untold_tokens=0)
        case AttachmentChange(state=AttachmentState.DETACHED):
            return dataclasses.replace(session, drafter_cached_length=0)
        case _:
            return session


def _bumped(session: Session, bumped: Bumped) -> Session:
    _require(bumped.epoch > session.epoch, "the epoch must rise")
    return dataclasses.replace(
        session,
        epoch=bumped.epoch,
        round=Round(0),
        verifier_cached_length=0,
        drafter_cached_length=0,
        epoch_speculative=SpeculativeStatistics(),
        earlier_speculative=session.speculative,
    )


def _opened(session: Session, opened: Opened) -> Session:
    prompt_length = len(opened.prompt_token_ids)
    _require(prompt_length > 0, "opened without a prompt")
    _require(session.prompt_length in (0, prompt_length), "another prompt than the session's")
    return dataclasses.replace(
        session,
        prompt_length=prompt_length,
        committed_length=max(session.committed_length, prompt_length) + len(opened.kept_token_ids),
        num_untold_tokens=len(opened.kept_token_ids),
    )


def _with_prompt_logprobs(session: Session, event: PromptLogprobs) -> Session:
    end_position = event.start_position + len(event.logprobs)
    _require(1 <= event.start_position < end_position <= session.prompt_length, "not positions of the prompt")
    return session


def _committed(session: Session, commit: Commit) -> Session:
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
        round=commit.round,
        committed_length=session.committed_length + len(commit.token_ids),
        num_untold_tokens=0,
        verifier_cached_length=commit.cached_length,
        drafter_cached_length=drafter_cached_length,
        epoch_speculative=_add(session.epoch_speculative, _of_round(statistics)),
    )


def _of_round(statistics: RoundStatistics) -> SpeculativeStatistics:
    return SpeculativeStatistics(
        num_drafts=int(statistics.num_draft_tokens > 0),
        num_draft_tokens=statistics.num_draft_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_accepted_tokens_per_pos=(1,) * statistics.num_accepted_tokens,
        num_draft_tokens_per_pos=(1,) * statistics.num_draft_tokens,
        num_rounds=1,
        num_fallback_decodes=int(statistics.fallback_decode),
    )


def _add(some: SpeculativeStatistics, more: SpeculativeStatistics) -> SpeculativeStatistics:
    """Sums; why speculation was off is the later one's to say."""
    return SpeculativeStatistics(
        num_drafts=some.num_drafts + more.num_drafts,
        num_draft_tokens=some.num_draft_tokens + more.num_draft_tokens,
        num_accepted_tokens=some.num_accepted_tokens + more.num_accepted_tokens,
        num_accepted_tokens_per_pos=_add_places(some.num_accepted_tokens_per_pos, more.num_accepted_tokens_per_pos),
        num_draft_tokens_per_pos=_add_places(some.num_draft_tokens_per_pos, more.num_draft_tokens_per_pos),
        num_rounds=some.num_rounds + more.num_rounds,
        num_stale_drafts=some.num_stale_drafts + more.num_stale_drafts,
        num_refused_drafts=some.num_refused_drafts + more.num_refused_drafts,
        num_fallback_decodes=some.num_fallback_decodes + more.num_fallback_decodes,
        disabled_reason=more.disabled_reason or some.disabled_reason,
    )


def _add_places(some: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first + second for first, second in zip_longest(some, more, fillvalue=0))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnexpectedEventError(message)
