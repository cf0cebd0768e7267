"""The state of an attachment, message by message."""

import pytest

from drafter_service.attachment import Attachment, OutOfStepError
from drafter_service.proposers.base import NOTHING, Proposal
from specdec.messages import BudgetUpdate, Detached, DetachReason, DropReason
from specdec.params import FinishReason
from tests.unit.drafter_service.messages import advance, attach_session, attached, dropped, verdict

GUESS = Proposal((4, 5, 6))


def new_attachment() -> Attachment:
    return Attachment(attach_session([1, 2, 3]), attached(start_position=3))


def test_tokens_told_at_attach_continue_those_that_are_known() -> None:
    attachment = Attachment(attach_session([1, 2, 3]), attached([4, 5], start_position=3))
    assert attachment.committed_token_ids == [1, 2, 3, 4, 5]


def test_tokens_told_from_the_start_replace_those_that_were_wrong() -> None:
    assert Attachment(attach_session([9, 9]), attached([1, 2, 3])).committed_token_ids == [1, 2, 3]


def test_tokens_beyond_what_is_known_are_out_of_step() -> None:
    with pytest.raises(OutOfStepError):
        Attachment(attach_session([1]), attached([4], start_position=2))


def test_one_draft_is_pending_at_a_time() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    assert not attachment.may_draft
    with pytest.raises(OutOfStepError):
        attachment.next_draft(GUESS, 3, 0.0, 0.0)


def test_a_verdict_brings_tokens_and_frees_the_way_for_the_next_draft() -> None:
    attachment = new_attachment()
    draft = attachment.next_draft(GUESS, 3, 0.01, 0.0)
    assert (draft.start_position, draft.draft_sequence) == (3, 1)
    outcome = attachment.apply(verdict(1, 3, [4, 5, 9], num_accepted=2))
    assert outcome is not None
    assert (outcome.num_judged_tokens, outcome.num_right_tokens) == (3, 2)
    assert attachment.committed_token_ids == [1, 2, 3, 4, 5, 9]
    assert attachment.next_draft(GUESS, 3, 0.0, 0.0).draft_sequence == 2


def test_tokens_behind_a_wrong_one_are_not_judged() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    outcome = attachment.apply(verdict(1, 3, [9], num_accepted=0))
    assert outcome is not None
    assert (outcome.num_judged_tokens, outcome.num_right_tokens) == (1, 0)


def test_a_draft_cut_by_the_verifier_was_not_wrong() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    outcome = attachment.apply(verdict(1, 3, [4, 5], num_accepted=1))  # cut to one token, then the bonus 5
    assert outcome is not None
    assert (outcome.num_judged_tokens, outcome.num_right_tokens) == (2, 2)


def test_an_advance_leaves_the_draft_pending_and_its_verdict_counts_what_came_before() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    assert attachment.apply(advance(3, [4])) is None
    assert not attachment.may_draft
    outcome = attachment.apply(verdict(1, 4, [5, 6, 7], num_accepted=2))
    assert outcome is not None
    assert outcome.num_right_tokens == 3


def test_a_drop_brings_what_was_missing() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    outcome = attachment.apply(dropped(1, DropReason.HEAD_DIFFERS, 5, [8, 9]))
    assert outcome is not None
    assert outcome.was_late
    assert attachment.committed_token_ids[-2:] == [8, 9]
    assert attachment.may_draft


def test_a_budget_of_0_holds_drafts_until_it_rises() -> None:
    attachment = new_attachment()
    attachment.apply(BudgetUpdate(0))
    assert not attachment.may_draft
    attachment.apply(advance(3, [4], draft_budget=3))
    assert attachment.may_draft


def test_a_gap_in_what_is_told_is_out_of_step() -> None:
    with pytest.raises(OutOfStepError):
        new_attachment().apply(advance(5, [6]))


@pytest.mark.parametrize("reason", [DropReason.STALE_ATTACHMENT, DropReason.STALE_EPOCH])
def test_a_stale_attachment_is_over(reason: DropReason) -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    attachment.apply(dropped(1, reason, 0))
    assert attachment.is_over


def test_the_end_of_the_output_or_a_detach_is_the_end() -> None:
    finished, left = new_attachment(), new_attachment()
    finished.next_draft(GUESS, 3, 0.0, 0.0)
    finished.apply(verdict(1, 3, [4], num_accepted=1, finish_reason=FinishReason.LENGTH))
    left.apply(Detached(DetachReason.REPLACED))
    assert finished.is_over
    assert left.is_over


def test_a_proposal_that_was_overtaken_is_sent_as_it_is_and_counts_if_it_was_right() -> None:
    attachment = new_attachment()
    attachment.apply(advance(3, [4]))
    draft = attachment.next_draft(GUESS, 3, 0.0, 0.0)
    assert (draft.start_position, tuple(draft.draft_token_ids)) == (3, (4, 5, 6))
    outcome = attachment.apply(verdict(1, 4, [5, 9], num_accepted=1))
    assert outcome is not None
    assert (outcome.num_judged_tokens, outcome.num_right_tokens) == (3, 2)


def test_a_proposal_that_came_to_nothing_holds_where_the_verifier_stands() -> None:
    attachment = new_attachment()
    attachment.apply(advance(3, [4]))
    assert attachment.next_draft(NOTHING, 3, 0.0, 0.0).start_position == 4


def test_a_draft_that_came_too_late_is_judged_by_what_was_committed_before() -> None:
    attachment = new_attachment()
    attachment.next_draft(GUESS, 3, 0.0, 0.0)
    outcome = attachment.apply(dropped(1, DropReason.HEAD_DIFFERS, 6, [4, 9, 9]))
    assert outcome is not None
    assert (outcome.num_judged_tokens, outcome.num_right_tokens) == (2, 1)
