"""Lookup where it is worth more than the model's guess, else the model."""

from collections.abc import Sequence

from drafter_service.proposers.base import NO_LIMITS, NOTHING, DraftLimits, Proposal
from drafter_service.proposers.stacked import StackedSession

LIMITS = DraftLimits(max_model_tokens=5, min_tokens_gained=1.2)
MODEL_GUESS = Proposal((7, 8), reach_probs=(0.8, 0.6), num_model_tokens=2)


class FixedSession:
    def __init__(self, proposal: Proposal, num_behind: int = 40) -> None:
        self.proposal = proposal
        self.num_behind = num_behind
        self.observed: list[tuple[int, int]] = []
        self.num_asked = 0

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        self.num_asked += 1
        return self.proposal

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.observed.append((num_draft_tokens, num_accepted_tokens))

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        return self.num_behind

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        self.num_behind = 0

    def close(self) -> None:
        pass


def lookup(*reach_probs: float) -> FixedSession:
    return FixedSession(Proposal(tuple(range(len(reach_probs))), reach_probs=reach_probs))


def test_a_likely_match_is_taken_and_the_model_is_neither_asked_nor_warmed() -> None:
    found, model = lookup(0.9, 0.8), FixedSession(MODEL_GUESS)
    session = StackedSession(found, model)
    assert session.propose([1], 8, LIMITS) == found.proposal
    assert model.num_asked == 0
    assert session.backlog([1]) == 0


def test_an_unlikely_match_gives_way_to_the_model() -> None:
    session = StackedSession(lookup(0.4, 0.2), FixedSession(MODEL_GUESS))
    assert session.propose([1], 8, LIMITS) == MODEL_GUESS


def test_the_long_tail_of_a_match_does_not_count_against_the_model() -> None:
    session = StackedSession(lookup(*[0.2] * 30), FixedSession(MODEL_GUESS))
    assert session.propose([1], 40, LIMITS) == MODEL_GUESS


def test_an_unlikely_match_is_better_than_nothing_while_the_model_catches_up() -> None:
    found = lookup(0.4)
    session = StackedSession(found, FixedSession(NOTHING))
    assert session.propose([1], 8, LIMITS) == found.proposal
    assert session.backlog([1]) == 40


def test_a_model_that_does_not_pay_is_not_asked_and_kept_warm_unless_lookups_suffice() -> None:
    found, model = lookup(), FixedSession(MODEL_GUESS)
    session = StackedSession(found, model)
    off = DraftLimits(max_model_tokens=0)
    assert session.propose([1], 8, off) == NOTHING
    assert model.num_asked == 0
    assert session.backlog([1]) == 40
    found.proposal = lookup(0.9, 0.8).proposal
    assert session.propose([1], 8, off) == found.proposal
    assert session.backlog([1]) == 0


def test_the_one_whose_guess_it_was_is_told_what_became_of_it() -> None:
    found, model = lookup(0.9, 0.8), FixedSession(MODEL_GUESS)
    session = StackedSession(found, model)
    session.propose([1], 8, LIMITS)
    session.observe(2, 1)
    found.proposal = NOTHING
    session.propose([1, 2], 8, LIMITS)
    session.observe(2, 2)
    assert found.observed == [(2, 1)]
    assert model.observed == [(2, 2)]
