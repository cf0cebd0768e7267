"""Each rule decides what its definition says, on chains and trees, with noise set by hand where chance matters."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from specdec.decoding.acceptance import Acceptance, accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise, Purpose
from specdec.messages import SparseDistribution
from specdec.params import AcceptanceRule, NextTokenKind

BONUS, RECOVERED, PLAIN = NextTokenKind.BONUS, NextTokenKind.RECOVERED, NextTokenKind.PLAIN
NOISE = Noise(seed=1)


@dataclass(frozen=True)
class SetNoise(Noise):
    """Uniform numbers by (position, purpose, index); all others are as good as random."""

    seed: int = 0
    numbers: dict[tuple[int, Purpose, int], float] = field(default_factory=dict)

    def uniform(self, position: int, purpose: Purpose, index: int = 0) -> float:
        return self.numbers.get((position, purpose, index), 0.5)


def rows(*probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float32).log()


def one_hot_rows(vocabulary_size: int, *token_ids: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token_ids), vocabulary_size).float()


def next_token(rule: AcceptanceRule, scores: torch.Tensor, position: int = 0) -> int:
    return accept(rule, scores[None], DraftTokens(), NOISE, position).next_token_id


# --- greedy and coupled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (DraftTokens([2, 3, 4]), Acceptance((0, 1, 2), 5, BONUS)),
        (DraftTokens([2, 9, 4]), Acceptance((0,), 3, RECOVERED)),
        (DraftTokens([9, 3, 4]), Acceptance((), 2, RECOVERED)),
    ],
)
def test_greedy_accepts_a_chain_up_to_the_first_difference(draft: DraftTokens, expected: Acceptance):
    assert accept(AcceptanceRule.GREEDY, one_hot_rows(10, 2, 3, 4, 5), draft, NOISE, 7) == expected


def test_a_round_without_a_draft_gives_a_plain_token():
    scores = one_hot_rows(10, 6) * 200  # certain under every rule
    for rule in AcceptanceRule:
        assert accept(rule, scores, DraftTokens(), NOISE, 7) == Acceptance((), 6, PLAIN)


def test_greedy_walks_a_tree_down_to_the_child_that_holds_the_argmax():
    #        root ─ 0:a=1 ─ 2:c=3 ;  root ─ 1:b=2 ─ {3:d=3, 4:e=4 ─ 5:f=5}
    tree = DraftTokens([1, 2, 3, 3, 4, 5], [-1, -1, 0, 1, 1, 4])
    scores = one_hot_rows(10, 2, 0, 4, 0, 0, 5, 8)  # root, then nodes 0 to 5
    assert accept(AcceptanceRule.GREEDY, scores, tree, NOISE, 0) == Acceptance((1, 4, 5), 8, BONUS)
    scores = one_hot_rows(10, 2, 0, 9, 0, 0, 5, 8)
    assert accept(AcceptanceRule.GREEDY, scores, tree, NOISE, 0) == Acceptance((1,), 9, RECOVERED)


@pytest.mark.parametrize("vocabulary_size", [5, 64, 1000, 152064])
def test_the_lowest_id_wins_among_equals(vocabulary_size: int):
    scores = torch.zeros(vocabulary_size)
    assert next_token(AcceptanceRule.GREEDY, scores) == 0
    equals = sorted({vocabulary_size - 1, vocabulary_size - 2, vocabulary_size // 2})
    scores[equals] = 1.5
    assert next_token(AcceptanceRule.GREEDY, scores) == equals[0]


def test_coupled_takes_the_argmax_of_scores_plus_gumbel_at_every_position():
    scores = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (4, 20)).astype(np.float32))
    samples = [int((scores[row].double() + NOISE.gumbel(30 + row, None, 20)).argmax()) for row in range(4)]
    draft = DraftTokens(samples[:3])
    assert accept(AcceptanceRule.COUPLED, scores, draft, NOISE, 30) == Acceptance((0, 1, 2), samples[3], BONUS)
    wrong = DraftTokens([samples[0], (samples[1] + 1) % 20, samples[2]])
    assert accept(AcceptanceRule.COUPLED, scores, wrong, NOISE, 30) == Acceptance((0,), samples[1], RECOVERED)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
def test_pruning_never_changes_a_coupled_token(spread: float):
    generator = np.random.default_rng(5)
    scores = torch.from_numpy(generator.normal(0, spread, 20000).astype(np.float32))
    for position in range(40):
        everything = scores.double() + NOISE.gumbel(position, None, 20000)
        assert next_token(AcceptanceRule.COUPLED, scores, position) == int(everything.argmax())


def test_coupled_never_takes_an_impossible_token_and_ignores_padding():
    scores = torch.full((30000,), -torch.inf)
    scores[[7, 20000]] = torch.tensor([-3.0, -3.5])
    tokens = [next_token(AcceptanceRule.COUPLED, scores, position) for position in range(50)]
    assert set(tokens) == {7, 20000}
    without = scores[:20001]
    assert [next_token(AcceptanceRule.COUPLED, without, position) for position in range(50)] == tokens


# --- one_hot and rejection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uniform", "is_accepted"), [(0.4999, True), (0.5, False), (0.5001, False)])
def test_acceptance_is_strict(uniform: float, is_accepted: bool):
    scores = rows([0.5, 0.25, 0.25], [1, 0, 0])
    numbers = {
        (4, Purpose.ACCEPT, 0): uniform,
        (4, Purpose.RECOVER, 0): 0.0,
        (5, Purpose.TARGET_SAMPLE, 0): 0.0,
    }
    one_hot = accept(AcceptanceRule.ONE_HOT, scores, DraftTokens([0]), SetNoise(numbers=numbers), 4)
    certain = DraftTokens([0], None, [SparseDistribution([0], [1.0])])
    rejection = accept(AcceptanceRule.REJECTION, scores, certain, SetNoise(numbers=numbers), 4)
    expected = Acceptance((0,), 0, BONUS) if is_accepted else Acceptance((), 1, RECOVERED)
    assert one_hot == rejection == expected


@pytest.mark.parametrize("token_id", [2, 3, 99])
def test_a_token_of_probability_0_never_passes_not_even_at_0(token_id: int):
    """Token 2 is impossible; 3 and 99 are padding, beyond the scores."""
    scores = rows([0.5, 0.5, 0.0], [1, 0, 0])
    numbers = {(0, Purpose.ACCEPT, 0): 0.0, (0, Purpose.RECOVER, 0): 0.75}
    drafts = (
        (AcceptanceRule.ONE_HOT, DraftTokens([token_id])),
        (AcceptanceRule.REJECTION, DraftTokens([token_id], None, [SparseDistribution([token_id, 0], [0.5, 0.5])])),
        (AcceptanceRule.REJECTION, DraftTokens([token_id], None, [SparseDistribution([token_id], [1.0])])),
    )
    for rule, draft in drafts:
        acceptance = accept(rule, scores, draft, SetNoise(numbers=numbers), 0)
        assert acceptance == Acceptance((), 1, RECOVERED)
    for rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED):
        assert accept(rule, scores, DraftTokens([token_id]), NOISE, 0).accepted_node_indices == ()


def test_one_hot_draws_from_the_target_without_the_rejected_token():
    scores = rows([0.5, 0.2, 0.3], [1, 0, 0])
    for uniform, token_id in ((0.0, 1), (0.39, 1), (0.41, 2), (0.99, 2)):
        numbers = {(0, Purpose.ACCEPT, 0): 0.9, (0, Purpose.RECOVER, 0): uniform}
        acceptance = accept(AcceptanceRule.ONE_HOT, scores, DraftTokens([0]), SetNoise(numbers=numbers), 0)
        assert acceptance == Acceptance((), token_id, RECOVERED)


def test_siblings_have_their_own_numbers_and_meet_what_earlier_ones_left():
    scores = rows([0.5, 0.2, 0.3], [1, 0, 0], [0, 0, 1])
    tree = DraftTokens([0, 2], [-1, -1])
    # After token 0 is struck out, token 2 has 0.6.
    numbers = {
        (0, Purpose.ACCEPT, 0): 0.5,
        (0, Purpose.ACCEPT, 1): 0.59,
        (0, Purpose.RECOVER, 0): 0.0,
        (1, Purpose.TARGET_SAMPLE, 0): 0.5,
    }
    accepted = accept(AcceptanceRule.ONE_HOT, scores, tree, SetNoise(numbers=numbers), 0)
    assert accepted == Acceptance((1,), 2, BONUS)
    numbers[0, Purpose.ACCEPT, 1] = 0.61
    assert accept(AcceptanceRule.ONE_HOT, scores, tree, SetNoise(numbers=numbers), 0) == Acceptance((), 1, RECOVERED)


def test_rejection_draws_from_what_the_target_has_more_of_than_the_draft():
    scores = rows([0.2, 0.5, 0.3], [1, 0, 0])
    draft_probs = [0.6, 0.3, 0.1]  # the residual is (0, 0.5, 0.5)
    sparse, full = SparseDistribution([2, 0, 1], [0.1, 0.6, 0.3]), SparseDistribution([], draft_probs)
    padded = SparseDistribution([], [*draft_probs, 0.0, 0.0])
    for distribution in (sparse, full, padded):
        draft = DraftTokens([0], None, [distribution])
        for uniform, token_id in ((0.0, 1), (0.49, 1), (0.51, 2)):
            numbers = {(0, Purpose.ACCEPT, 0): 0.34, (0, Purpose.RECOVER, 0): uniform}
            acceptance = accept(AcceptanceRule.REJECTION, scores, draft, SetNoise(numbers=numbers), 0)
            assert acceptance == Acceptance((), token_id, RECOVERED)
        numbers = {(0, Purpose.ACCEPT, 0): 0.33, (1, Purpose.TARGET_SAMPLE, 0): 0.0}
        accepted = accept(AcceptanceRule.REJECTION, scores, draft, SetNoise(numbers=numbers), 0)
        assert accepted == Acceptance((0,), 0, BONUS)


def test_rejection_draws_from_the_target_where_the_residual_is_all_zero():
    """The draft is the target but for rounding, and the number the largest there is: token 0 falls just short."""
    scores = rows([0.5, 0.5], [1, 0])
    draft = DraftTokens([0], None, [SparseDistribution([0, 1], [0.5, 0.5])])
    always_rejected = {(0, Purpose.ACCEPT, 0): 1.0, (0, Purpose.RECOVER, 0): 0.7}
    acceptance = accept(AcceptanceRule.REJECTION, scores, draft, SetNoise(numbers=always_rejected), 0)
    assert acceptance == Acceptance((), 1, RECOVERED)


def test_probabilities_that_sum_to_1_within_the_tolerance_are_normalised_first():
    scores = rows([0.5, 0.5], [1, 0])
    draft = DraftTokens([0], None, [SparseDistribution([0, 1], [0.4995, 0.4995])])
    just_below_1 = {(0, Purpose.ACCEPT, 0): 1 - 1e-6, (1, Purpose.TARGET_SAMPLE, 0): 0.0}
    acceptance = accept(AcceptanceRule.REJECTION, scores, draft, SetNoise(numbers=just_below_1), 0)
    assert acceptance == Acceptance((0,), 0, BONUS)


def test_a_repeated_sibling_is_rejected_by_one_hot():
    scores = rows([0.5, 0.5], [1, 0], [1, 0])
    numbers = {(0, Purpose.ACCEPT, 0): 0.5, (0, Purpose.ACCEPT, 1): 0.0, (0, Purpose.RECOVER, 0): 0.0}
    acceptance = accept(AcceptanceRule.ONE_HOT, scores, DraftTokens([0, 0], [-1, -1]), SetNoise(numbers=numbers), 0)
    assert acceptance == Acceptance((), 1, RECOVERED)


def test_a_draw_never_takes_a_token_of_probability_0():
    scores = rows([0.0, 0.25, 0.0, 0.75, 0.0])

    def drawn(uniform: float) -> int:
        noise = SetNoise(numbers={(0, Purpose.TARGET_SAMPLE, 0): uniform})
        return accept(AcceptanceRule.ONE_HOT, scores, DraftTokens(), noise, 0).next_token_id

    assert [drawn(uniform) for uniform in (0.0, 0.2499, 0.25, 0.5, 1 - 2.0**-53)] == [1, 1, 3, 3, 3]


def test_scores_that_do_not_fit_the_draft_raise():
    with pytest.raises(ValueError, match="rows of scores"):
        accept(AcceptanceRule.GREEDY, one_hot_rows(5, 1, 2), DraftTokens([1, 2]), NOISE, 0)
    with pytest.raises(ValueError, match="distribution"):
        accept(AcceptanceRule.REJECTION, one_hot_rows(5, 1, 2), DraftTokens([1]), NOISE, 0)
