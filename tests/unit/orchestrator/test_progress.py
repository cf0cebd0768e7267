"""What a session has come to over several verifiers, and what its client and its record get of that."""

import dataclasses
import types
from typing import cast

import pytest

from orchestrator.claim import Claim
from orchestrator.progress import Progress
from orchestrator.record import SessionRecord
from specdec.ids import Epoch, Round, SessionId, digest_tokens
from specdec.messages import (
    Commit,
    Delta,
    Finished,
    Numerics,
    Opened,
    PositionLogprobs,
    PromptLogprobs,
    RoundStatistics,
    SessionFinished,
    SpeculativeStatistics,
    Started,
    TokenLogprob,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason, GenerationSpec, StopCriteria
from specdec.session import SessionPhase, UnexpectedEventError, VerifierGone

PROMPT = (5, 6, 7)
NUMERICS = Numerics("bits", "w", "d", "c", "cpu", "l", "a", "v")
OPENED = Opened(b"k" * 32, PROMPT, AcceptanceRule.GREEDY, NUMERICS, "target", 16)
KEPT = dataclasses.replace(OPENED, kept_token_ids=(1, 2), kept_epoch=Epoch(1))
CLAIM = Claim(SessionId("s"), b"n" * 16, GenerationSpec(prompt="three words long", num_prompt_logprobs=0))


def _commit(number: int, base_position: int, *token_ids: int) -> Commit:
    return Commit(
        Round(number), base_position, token_ids, "text", RoundStatistics(0, 0, None, 0.1, 0.1, 0.0), base_position
    )


def _streaming() -> Progress:
    """Of a session that has two output tokens."""
    progress = Progress(CLAIM)
    progress.enter_epoch(Epoch(1))
    progress.begin(OPENED)
    progress.commit(_commit(1, 3, 8, 9), "")
    return progress


def _lost(progress: Progress) -> Progress:
    progress.apply(VerifierGone())
    progress.enter_epoch(Epoch(progress.session.epoch + 1))
    return progress


def test_the_next_verifier_is_asked_for_what_the_first_one_had_in_force() -> None:
    claim = _lost(_streaming()).claim_now()
    assert claim.committed_token_ids == (*PROMPT, 8, 9)
    assert (claim.prompt_length, claim.numerics_fingerprint) == (3, "bits")
    assert (claim.spec.prompt, claim.spec.model) == (PROMPT, "target")
    assert claim.spec.stop == StopCriteria(max_new_tokens=16)


def test_before_any_output_the_prompt_is_asked_to_be_scored_again_and_what_was_told_is_left_out() -> None:
    progress = Progress(CLAIM)
    progress.enter_epoch(Epoch(1))
    progress.begin(OPENED)
    first, second = (PositionLogprobs(TokenLogprob(token_id, -1.0)) for token_id in PROMPT[1:])
    assert progress.prompt_logprobs(PromptLogprobs(1, (first,))) == PromptLogprobs(1, (first,))
    _lost(progress)
    claim = progress.claim_now()
    assert (claim.committed_token_ids, claim.spec.num_prompt_logprobs) == ((), 0)
    progress.begin(OPENED)
    assert progress.prompt_logprobs(PromptLogprobs(1, (first, second))) == PromptLogprobs(2, (second,))
    _lost(progress)
    progress.begin(OPENED)
    assert progress.prompt_logprobs(PromptLogprobs(1, (first, second))) is None


def test_a_stream_starts_once_and_tokens_kept_by_the_next_verifier_are_told_where_they_belong() -> None:
    progress = Progress(CLAIM)
    progress.enter_epoch(Epoch(1))
    (started,) = progress.begin(OPENED)
    assert isinstance(started, Started)
    progress.commit(_commit(1, 3, 8, 9), "")
    assert _lost(progress).begin(KEPT) == []
    committed, delta = progress.commit(_commit(1, 7, 4), "")
    assert (delta.position, delta.token_ids, delta.text) == (5, (1, 2, 4), "text")
    assert (committed.base_position, committed.token_ids) == (7, (4,))
    assert committed.prefix_digest == digest_tokens((*PROMPT, 8, 9, 1, 2, 4))


def test_tokens_that_were_kept_are_recorded_at_once_and_told_with_their_text_alone() -> None:
    progress = _lost(_streaming())
    progress.begin(KEPT)
    checkpoint = progress.checkpoint("", "")
    assert checkpoint.token_ids == (*PROMPT, 8, 9, 1, 2)
    assert checkpoint.prefix_digest == digest_tokens(checkpoint.token_ids)
    assert progress.cancelled().usage == Usage(3, 2)
    claim = _lost(progress).claim_now()  # its verifier was lost before their text came: they are offered to the next
    assert claim.committed_token_ids == (*PROMPT, 8, 9)
    assert (claim.recorded_token_ids, claim.recorded_epoch) == ((1, 2), 1)
    progress.begin(OPENED)  # which has no use for them
    _, delta = progress.commit(_commit(1, 5, 4), "")
    assert (delta.position, delta.token_ids) == (5, (4,))


def test_an_output_that_ends_in_what_was_kept_is_told_with_its_text_before_it_finishes() -> None:
    progress = _lost(_streaming())
    progress.begin(KEPT)
    kept, finished = progress.finish(SessionFinished(FinishReason.LENGTH, Usage(3, 4), SpeculativeStatistics(), "rest"))
    assert isinstance(kept, Delta)
    assert (kept.position, kept.token_ids, kept.text) == (5, (1, 2), "rest")
    assert isinstance(finished, Finished)
    assert finished.text == ""


def test_a_verifier_that_opens_with_another_prompt_is_not_believed() -> None:
    progress = _lost(_streaming())
    with pytest.raises(UnexpectedEventError):
        progress.begin(dataclasses.replace(OPENED, prompt_token_ids=(5, 6, 8)))
    assert progress.session.phase is SessionPhase.BUMPED
    assert progress.known_token_ids() == (*PROMPT, 8, 9)


def test_an_epoch_that_nobody_took_is_followed_by_the_next() -> None:
    progress = _lost(_streaming())
    progress.enter_epoch(Epoch(7))
    assert (progress.session.epoch, progress.session.phase) == (7, SessionPhase.BUMPED)


def test_the_last_frame_tells_of_other_verifiers_and_other_numerics() -> None:
    progress = _lost(_streaming())
    progress.begin(dataclasses.replace(OPENED, numerics=dataclasses.replace(NUMERICS, fingerprint="other bits")))
    (finished,) = progress.finish(SessionFinished(FinishReason.LENGTH, Usage(3, 2), SpeculativeStatistics(), "rest"))
    assert isinstance(finished, Finished)
    assert (finished.num_failovers, finished.numerics_changed, finished.text) == (1, True, "rest")


def test_a_resumed_session_whose_output_others_decided_says_so() -> None:
    claim = dataclasses.replace(
        CLAIM, committed_token_ids=(*PROMPT, 8), prompt_length=3, numerics_fingerprint="other bits"
    )
    progress = Progress(claim)
    progress.enter_epoch(Epoch(4))
    progress.begin(OPENED)
    assert progress.cancelled().numerics_changed
    assert progress.cancelled().num_failovers == 0


def _unread() -> Claim:
    """Of a session whose client brings its prompt as text and has received (8, 9); the record has 3 + 4 tokens."""
    record = cast("SessionRecord", types.SimpleNamespace(prompt_length=len(PROMPT)))
    return dataclasses.replace(CLAIM, committed_token_ids=(8, 9), unread_prompt_of=record)


def test_output_waits_for_its_prompt_to_be_read_and_then_everything_counts_from_there() -> None:
    progress = Progress(_unread())
    progress.enter_epoch(Epoch(4))
    assert (progress.session.prompt_length, progress.session.committed_length) == (3, 5)
    assert progress.claim_now() == _unread()
    progress.begin(KEPT)
    assert (progress.session.committed_length, progress.known_token_ids()) == (7, (*PROMPT, 8, 9))
    committed, delta = progress.commit(_commit(1, 7, 4), "")
    assert (delta.position, delta.token_ids) == (5, (1, 2, 4))
    assert committed.prefix_digest == digest_tokens((*PROMPT, 8, 9, 1, 2, 4))
    claim = _lost(progress).claim_now()
    assert (claim.spec.prompt, claim.prompt_length) == (PROMPT, 3)
    assert claim.committed_token_ids == (*PROMPT, 8, 9, 1, 2, 4)
    assert claim.unread_prompt_of is None


def test_a_session_that_is_resumed_is_never_a_new_one() -> None:
    assert CLAIM.must_be_new
    assert not _unread().must_be_new
    assert not dataclasses.replace(_unread(), committed_token_ids=()).must_be_new
