"""The session's state machine."""

import dataclasses

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
    SessionFinished,
    SpeculativeStatistics,
    TokenLogprob,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason, NextTokenKind
from specdec.session import (
    ClientGone,
    Reclaimed,
    Session,
    SessionPhase,
    UnexpectedEventError,
    VerifierGone,
    apply,
)

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


@pytest.mark.parametrize("last", [FINISHED, Fenced(Epoch(9)), ClientGone(), VerifierGone()])
def test_an_ended_session_takes_nothing_more(last: SessionFinished | Fenced | ClientGone | VerifierGone) -> None:
    ended = apply(apply(CLAIMED, OPENED), last)
    for event in (commit(1, 3, 1), Reclaimed(Epoch(2)), FINISHED, ClientGone()):
        with pytest.raises(UnexpectedEventError):
            apply(ended, event)
