"""The session's state machine alone, under events that come twice, late, in another order or not at all.

The reference is a list of tokens and who may add to it: what it takes, `apply` takes, and nothing else.
"""

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.ids import AttachmentId, Epoch, Round, SessionId
from specdec.messages import (
    AttachmentChange,
    AttachmentState,
    Commit,
    Draining,
    Fenced,
    Numerics,
    Opened,
    RoundStatistics,
    SessionEvent,
    SessionFinished,
    SpeculativeStatistics,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason
from specdec.session import (
    Bumped,
    ClientGone,
    GaveUp,
    OwnEvent,
    Reclaimed,
    Session,
    SessionPhase,
    UnexpectedEventError,
    VerifierGone,
    apply,
)

PROMPT = (5, 6, 7)
NUMERICS = Numerics("f", "w", "d", "c", "cpu", "l", "a", "v")
FINISHED = SessionFinished(FinishReason.LENGTH, Usage(3, 2), SpeculativeStatistics(), "")
WHOLE = range(100, 10_000)
"""The tokens that any verifier would decide, by position."""
AHEAD = st.sampled_from((0, 0, 0, -1, 1))


@dataclasses.dataclass
class Reference:
    """`verifier`: none has the session, one has it, or the last one was lost."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    num_untold: int = 0
    """At their end: kept by the verifier that has the session, and not told to the client yet."""
    epoch: int = 1
    round: int = 0
    verifier: str = "none"
    was_opened: bool = False
    ended: SessionPhase | None = None

    def takes(self, event: SessionEvent | OwnEvent) -> bool:
        """Whether it follows; then it has happened."""
        if self.ended is not None:
            return False
        match event:
            case Reclaimed() if not self.was_opened and event.epoch > self.epoch:
                self.epoch = event.epoch
            case Opened() if self.verifier == "none":
                self.was_opened, self.verifier = True, "open"
                self.tokens += event.kept_token_ids
                self.num_untold = len(event.kept_token_ids)
            case Commit() if self.verifier == "open" and event.round == self.round + 1:
                if event.base_position != len(PROMPT) + len(self.tokens) or not event.token_ids:
                    return False
                self.round += 1
                self.tokens += event.token_ids
                self.num_untold = 0
            case VerifierGone() if not self.was_opened:
                pass
            case VerifierGone() if self.verifier != "lost":
                self.verifier = "lost"
                del self.tokens[len(self.tokens) - self.num_untold :]
                self.num_untold = 0
            case Bumped() if self.verifier == "lost" and event.epoch > self.epoch:
                self.epoch, self.round, self.verifier = event.epoch, 0, "none"
            case Fenced():
                if self.was_opened:
                    self.ended = SessionPhase.FENCED
            case SessionFinished() if self.verifier == "open":
                self.ended = SessionPhase.FINISHED
                self.num_untold = 0
            case ClientGone():
                self.ended = SessionPhase.DETACHED
            case GaveUp() if self.verifier != "open":
                self.ended = SessionPhase.DETACHED
            case AttachmentChange() | Draining() if self.verifier == "open":
                pass
            case _:
                return False
        return True


class AnyEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.session = Session(SessionId("s"), Epoch(1), b"n" * 16)
        self.reference = Reference()
        self.seen: list[SessionEvent | OwnEvent] = []

    def tell(self, event: SessionEvent | OwnEvent) -> None:
        self.seen.append(event)
        before = self.session
        if self.reference.takes(event):
            self.session = apply(before, event)
            return
        try:
            apply(before, event)
        except UnexpectedEventError:
            return
        raise AssertionError(f"{event} was taken in {before.phase.value}")

    @rule(num_kept=st.integers(0, 2))
    def opens(self, num_kept: int) -> None:
        start = len(self.reference.tokens)
        kept = tuple(WHOLE[start : start + num_kept])
        self.tell(Opened(b"k" * 32, PROMPT, AcceptanceRule.GREEDY, NUMERICS, "m", 16, kept))

    @rule(
        num_tokens=st.integers(0, 3), rounds_ahead=st.sampled_from((0, 0, 0, -1, 1)), shift=st.sampled_from((0, 0, 1))
    )
    def commits(self, num_tokens: int, rounds_ahead: int, shift: int) -> None:
        start = len(self.reference.tokens) + shift
        tokens = tuple(WHOLE[start : start + num_tokens])
        statistics = RoundStatistics(num_tokens, max(0, num_tokens - 1), None, 0.1, 0.1, 0.0)
        round_number = Round(self.reference.round + 1 + rounds_ahead)
        self.tell(Commit(round_number, len(PROMPT) + start, tokens, "", statistics, len(PROMPT) + start))

    @rule(rises_by=st.integers(-1, 2))
    def rises(self, rises_by: int) -> None:
        self.tell(Bumped(Epoch(self.reference.epoch + rises_by)))

    @rule(rises_by=st.integers(-1, 2))
    def claims_again(self, rises_by: int) -> None:
        self.tell(Reclaimed(Epoch(self.reference.epoch + rises_by)))

    @rule(event=st.sampled_from((VerifierGone(), VerifierGone(), Draining(1.0))))
    def is_left(self, event: SessionEvent | OwnEvent) -> None:
        self.tell(event)

    @rule(state=st.sampled_from(AttachmentState))
    def attachment_changes(self, state: AttachmentState) -> None:
        self.tell(AttachmentChange(AttachmentId(1), state))

    @rule(event=st.sampled_from((FINISHED, Fenced(Epoch(9)), ClientGone(), GaveUp())), really=st.integers(0, 3))
    def ends(self, event: SessionEvent | OwnEvent, really: int) -> None:
        if really == 0:  # else every sequence would be short
            self.tell(event)

    @rule(back=st.integers(1, 4))
    def comes_again(self, back: int) -> None:
        if back <= len(self.seen):
            self.tell(self.seen[-back])

    @invariant()
    def counts_are_those_of_the_reference(self) -> None:
        session, reference = self.session, self.reference
        assert (session.epoch, session.round) == (reference.epoch, reference.round)
        assert reference.tokens == list(WHOLE[: len(reference.tokens)])  # no gap, no repeat
        if reference.was_opened:
            assert session.usage == Usage(len(PROMPT), len(reference.tokens) - reference.num_untold)
        if reference.ended is not SessionPhase.FINISHED:  # then the verifier's own word counts
            assert session.speculative.num_rounds >= session.round
        assert session.finish_reason is None or session.phase is SessionPhase.FINISHED
        if reference.ended is not None:
            assert session.phase is reference.ended


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
