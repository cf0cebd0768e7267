"""The session's state machine."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from specdec.ids import AttachmentId, Epoch, Round, SessionId
from specdec.messages import (
    AttachmentChange,
    AttachmentState,
    Commit,
    Fenced,
    Numerics,
    Opened,
    PositionLogprobs,
    PromptLogprobs,
    RoundStatistics,
    SessionEvent,
    SessionFinished,
    SpeculativeStatistics,
    TokenLogprob,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason, NextTokenKind
from specdec.session import (
    NEXT_PHASE,
    Bumped,
    ClientGone,
    OwnEvent,
    Reclaimed,
    Session,
    SessionPhase,
    UnexpectedEventError,
    VerifierGone,
    apply,
)

TABLE = Path(__file__).parents[2] / "docs" / "sessions.md"
CLAIMED = Session(SessionId("s"), Epoch(1), b"n" * 16)
NUMERICS = Numerics("f", "w", "d", "c", "cpu", "l", "a", "v")
OPENED = Opened(b"k" * 32, (5, 6, 7), AcceptanceRule.GREEDY, NUMERICS, "m", 16)
FINISHED = SessionFinished(FinishReason.LENGTH, Usage(3, 2), SpeculativeStatistics(), "")


def commit(number: int, base_position: int, num_tokens: int, num_drafted: int = 0, num_accepted: int = 0) -> Commit:
    kind = NextTokenKind.RECOVERED if num_drafted else NextTokenKind.PLAIN
    statistics = RoundStatistics(num_drafted, num_accepted, kind, 0.1, 0.1, 0.0)
    return Commit(Round(number), base_position, tuple(range(num_tokens)), "", statistics, base_position)


def test_a_session_runs_from_claim_to_finish() -> None:
    session = apply(CLAIMED, OPENED)
    assert (session.phase, session.prompt_length, session.committed_length) == (SessionPhase.OPENED, 3, 3)
    session = apply(session, commit(1, 3, 1))
    session = apply(session, commit(2, 4, 3, num_drafted=4, num_accepted=2))
    assert (session.phase, session.round, session.committed_length) == (SessionPhase.STREAMING, 2, 7)
    assert session.usage == Usage(3, 4)
    session = apply(session, FINISHED)
    assert (session.phase, session.finish_reason) == (SessionPhase.FINISHED, FinishReason.LENGTH)


def test_log_probabilities_of_the_prompt_come_between_its_opening_and_the_first_commit() -> None:
    some = PositionLogprobs(TokenLogprob(6, -1.0))
    opened = apply(CLAIMED, OPENED)
    assert apply(opened, PromptLogprobs(1, (some, some))) == opened
    for start_position, num_positions in ((0, 1), (2, 2), (1, 0)):
        with pytest.raises(UnexpectedEventError):
            apply(opened, PromptLogprobs(start_position, (some,) * num_positions))
    with pytest.raises(UnexpectedEventError):
        apply(CLAIMED, PromptLogprobs(1, (some,)))
    with pytest.raises(UnexpectedEventError):
        apply(apply(opened, commit(1, 3, 1)), PromptLogprobs(1, (some,)))


def test_a_commit_brings_log_probabilities_of_all_its_tokens_or_of_none() -> None:
    some = PositionLogprobs(TokenLogprob(6, -1.0))
    opened = apply(CLAIMED, OPENED)
    two_tokens = commit(1, 3, 2)
    assert apply(opened, dataclasses.replace(two_tokens, logprobs=(some, some))).committed_length == 5
    with pytest.raises(UnexpectedEventError):
        apply(opened, dataclasses.replace(two_tokens, logprobs=(some,)))


def test_a_resumed_session_goes_on_behind_what_was_committed_and_kept() -> None:
    resumed = dataclasses.replace(CLAIMED, prompt_length=3, committed_length=8)
    session = apply(resumed, dataclasses.replace(OPENED, kept_token_ids=(1, 2), kept_epoch=Epoch(1)))
    assert session.committed_length == 10
    assert apply(session, commit(1, 10, 1)).committed_length == 11


def test_statistics_add_up_by_place() -> None:
    session = apply(CLAIMED, OPENED)
    session = apply(session, commit(1, 3, 3, num_drafted=2, num_accepted=2))
    session = apply(session, commit(2, 6, 2, num_drafted=3, num_accepted=1))
    session = apply(session, commit(3, 8, 1))
    assert session.speculative == SpeculativeStatistics(
        num_drafts=2,
        num_draft_tokens=5,
        num_accepted_tokens=3,
        num_accepted_tokens_per_pos=(2, 1),
        num_draft_tokens_per_pos=(2, 2, 1),
        num_rounds=3,
    )


def test_a_drafters_cache_is_one_short_after_a_full_accept_and_unknown_after_it_left() -> None:
    session = apply(CLAIMED, OPENED)
    session = apply(session, commit(1, 3, 4, num_drafted=3, num_accepted=3))
    assert session.drafter_cached_length == 5
    session = apply(session, commit(2, 7, 2, num_drafted=3, num_accepted=1))
    assert session.drafter_cached_length == 8
    session = apply(session, AttachmentChange(AttachmentId(1), AttachmentState.DETACHED))
    assert session.drafter_cached_length == 0


@pytest.mark.parametrize("wrong", [commit(2, 3, 1), commit(0, 3, 1), commit(1, 4, 1), commit(1, 2, 1), commit(1, 3, 0)])
def test_a_commit_must_follow_the_last_one(wrong: Commit) -> None:
    with pytest.raises(UnexpectedEventError):
        apply(apply(CLAIMED, OPENED), wrong)


def test_nothing_is_committed_or_finished_before_a_verifier_took_the_session() -> None:
    for event in (commit(1, 0, 1), FINISHED):
        with pytest.raises(UnexpectedEventError):
            apply(CLAIMED, event)


def test_a_claim_may_be_made_again_only_before_it_is_opened_and_with_a_higher_epoch() -> None:
    assert apply(CLAIMED, Reclaimed(Epoch(5))).epoch == 5
    with pytest.raises(UnexpectedEventError):
        apply(CLAIMED, Reclaimed(Epoch(1)))
    with pytest.raises(UnexpectedEventError):
        apply(apply(CLAIMED, OPENED), Reclaimed(Epoch(5)))


@pytest.mark.parametrize("last", [FINISHED, Fenced(Epoch(9)), ClientGone()])
def test_an_ended_session_takes_nothing_more(last: SessionFinished | Fenced | ClientGone) -> None:
    ended = apply(apply(CLAIMED, OPENED), last)
    for event in (commit(1, 3, 1), Reclaimed(Epoch(2)), Bumped(Epoch(2)), FINISHED, ClientGone(), VerifierGone()):
        with pytest.raises(UnexpectedEventError):
            apply(ended, event)


def test_a_session_that_lost_its_verifier_goes_on_at_another_in_a_higher_epoch_with_what_was_committed() -> None:
    session = apply(apply(CLAIMED, OPENED), commit(1, 3, 2, num_drafted=2, num_accepted=1))
    session = apply(apply(session, VerifierGone()), Bumped(Epoch(4)))
    assert (session.phase, session.epoch, session.round) == (SessionPhase.BUMPED, 4, 0)
    assert (session.committed_length, session.verifier_cached_length, session.drafter_cached_length) == (5, 0, 0)
    session = apply(apply(session, OPENED), commit(1, 5, 1))
    assert (session.phase, session.round, session.committed_length) == (SessionPhase.STREAMING, 1, 6)
    assert session.usage == Usage(3, 3)


def test_statistics_are_summed_over_all_verifiers_and_the_last_ones_word_counts_for_its_own() -> None:
    session = apply(apply(CLAIMED, OPENED), commit(1, 3, 2, num_drafted=2, num_accepted=1))
    for event in (VerifierGone(), Bumped(Epoch(2)), OPENED, commit(1, 5, 3, num_drafted=3, num_accepted=2)):
        session = apply(session, event)
    told = SpeculativeStatistics(1, 3, 2, (1, 1), (1, 1, 1), 1, num_stale_drafts=7, disabled_reason="UNPROFITABLE")
    session = apply(session, dataclasses.replace(FINISHED, speculative=told))
    assert session.speculative == SpeculativeStatistics(
        2, 5, 3, (2, 1), (2, 2, 1), 2, num_stale_drafts=7, disabled_reason="UNPROFITABLE"
    )


def test_nobody_takes_a_lost_session_before_its_epoch_has_risen() -> None:
    lost = apply(apply(CLAIMED, OPENED), VerifierGone())
    with pytest.raises(UnexpectedEventError):
        apply(lost, OPENED)
    with pytest.raises(UnexpectedEventError):
        apply(lost, Bumped(Epoch(1)))
    bumped = apply(lost, Bumped(Epoch(2)))
    with pytest.raises(UnexpectedEventError):  # an attempt that may have left rows behind is over first
        apply(bumped, Bumped(Epoch(3)))
    assert apply(apply(bumped, VerifierGone()), Bumped(Epoch(3))).epoch == 3


def test_an_owner_that_is_fenced_never_comes_back_once_a_verifier_had_the_session() -> None:
    fenced = Fenced(Epoch(9))
    assert apply(apply(CLAIMED, fenced), Reclaimed(Epoch(10))).epoch == 10
    lost = apply(apply(CLAIMED, OPENED), VerifierGone())
    for session in (apply(CLAIMED, OPENED), lost, apply(lost, Bumped(Epoch(2)))):
        assert apply(session, fenced).phase is SessionPhase.FENCED


def test_the_table_in_the_docs_shows_every_pair_of_phase_and_event() -> None:
    expected = {event: {phase: NEXT_PHASE[event].get(phase) for phase in SessionPhase} for event in NEXT_PHASE}
    assert set(expected) == {*get_args(SessionEvent), *get_args(OwnEvent)}
    first_table = TABLE.read_text().split("\n\n")[2]
    rows = [line.strip("| ").split("|") for line in first_table.splitlines()]
    (_, *phases), _, *events = [[cell.strip().strip("`") for cell in row] for row in rows]
    shown = {name: dict(zip(phases, cells, strict=True)) for name, *cells in events}
    assert shown == {
        event.__name__: {phase.value: after.value if after is not None else "-" for phase, after in row.items()}
        for event, row in expected.items()
    }
