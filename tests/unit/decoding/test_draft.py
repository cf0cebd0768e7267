"""A drafter is not trusted: each way for a draft to be wrong has its refusal."""

import math

import numpy as np
import pytest

from specdec.decoding.draft import DraftTokens, check_draft, check_draft_probs, check_tree
from specdec.messages import RefusalReason, SparseDistribution
from specdec.params import MAX_DRAFT_NODES, AcceptanceRule

V = 10


def rejection_draft(token_id: int, token_ids: list[int], probs: list[float]) -> DraftTokens:
    return DraftTokens([token_id], None, [SparseDistribution(token_ids, probs)])


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_an_empty_draft_is_admissible_under_every_rule(rule: AcceptanceRule):
    assert check_draft(DraftTokens(), rule, V) is None


@pytest.mark.parametrize("token_id", [-1, V, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int):
    draft = DraftTokens([3, token_id])
    assert check_draft(draft, AcceptanceRule.GREEDY, V) is RefusalReason.TOKEN_OUT_OF_VOCABULARY


def test_more_nodes_than_the_protocol_allows_are_refused():
    draft = DraftTokens([1] * (MAX_DRAFT_NODES + 1))
    assert check_draft(draft, AcceptanceRule.COUPLED, V) is RefusalReason.TOO_MANY_NODES
    assert check_draft(DraftTokens([1] * MAX_DRAFT_NODES), AcceptanceRule.COUPLED, V) is None


@pytest.mark.parametrize("parents", [[0, 0, 1], [-1, 1, 0], [-1, 2, 1], [-1, 0], [-1, 0, 1, 2], [-2, 0, 1]])
def test_a_tree_whose_parents_do_not_stand_before_their_children_is_refused(parents: list[int]):
    assert check_tree(DraftTokens([1, 2, 3], parents)) is RefusalReason.MALFORMED_TREE
    assert check_draft(DraftTokens([1, 2, 3], parents), AcceptanceRule.ONE_HOT, V) is RefusalReason.MALFORMED_TREE


@pytest.mark.parametrize("parents", [None, [], [-1, 0, 1], [-1, -1, -1], [-1, 0, 0], [-1, -1, 0]])
def test_chains_and_well_formed_trees_are_admissible(parents: list[int] | None):
    assert check_tree(DraftTokens([1, 2, 3], parents)) is None


def test_rows_know_their_children_and_nodes_their_path():
    tree = DraftTokens([1, 2, 3, 4], [-1, 0, -1, 1])
    assert tree.children_of_row == [[0, 2], [1], [3], [], []]
    assert tree.path_to(3) == [1, 2, 4]
    chain = DraftTokens([7, 8])
    assert chain.children_of_row == [[0], [1], []]
    assert chain.path_to(1) == [7, 8]


def test_probabilities_are_refused_by_rules_that_take_none():
    draft = rejection_draft(3, [3], [1.0])
    for rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT):
        assert check_draft(draft, rule, V) is RefusalReason.NOT_ALLOWED_BY_RULE
    assert check_draft(draft, AcceptanceRule.REJECTION, V) is None


@pytest.mark.parametrize(
    ("token_ids", "probs", "reason"),
    [
        ([3, 4], [0.5, 0.5], None),
        ([4, 3], [0.4995, 0.4998], None),  # within 1e-3
        ([], [0.1] * 10, None),
        ([], [0.0, 0.0, 0.0, 1.0], None),  # the drafter's vocabulary may be the smaller one
        ([3, 4], [0.5, 0.502], RefusalReason.UNNORMALISED),
        ([3, 4], [0.5, 0.498], RefusalReason.UNNORMALISED),
        ([], [0.2] * 10, RefusalReason.UNNORMALISED),
        ([3, 4], [math.nan, 0.5], RefusalReason.INVALID_PROBABILITY),
        ([3, 4], [math.inf, 0.5], RefusalReason.INVALID_PROBABILITY),
        ([3, 4], [1.2, -0.2], RefusalReason.INVALID_PROBABILITY),
        ([3, 3], [0.5, 0.5], RefusalReason.INVALID_PROBABILITY),
        ([3, V], [0.5, 0.5], RefusalReason.TOKEN_OUT_OF_VOCABULARY),
        ([3, -1], [0.5, 0.5], RefusalReason.TOKEN_OUT_OF_VOCABULARY),
        ([], [1.0 / 11] * 11, RefusalReason.TOKEN_OUT_OF_VOCABULARY),
        ([2, 4], [0.5, 0.5], RefusalReason.MISSING_PROBABILITY),
        ([3, 4], [0.0, 1.0], RefusalReason.MISSING_PROBABILITY),
        ([], [0.5, 0.5], RefusalReason.MISSING_PROBABILITY),
        ([], [], RefusalReason.MISSING_PROBABILITY),
        ([3, 4], [1.0], RefusalReason.MISSING_PROBABILITY),
    ],
)
def test_a_draft_distribution_is_checked(token_ids: list[int], probs: list[float], reason: RefusalReason | None):
    assert check_draft_probs(rejection_draft(3, token_ids, probs), V) is reason


def test_every_node_needs_its_distribution():
    one = SparseDistribution([1, 2], [0.5, 0.5])
    assert check_draft_probs(DraftTokens([1, 2], None, [one]), V) is RefusalReason.MISSING_PROBABILITY
    assert check_draft_probs(DraftTokens([1, 2]), V) is RefusalReason.MISSING_PROBABILITY
    assert check_draft_probs(DraftTokens([1, 2], None, [one, one]), V) is None


def test_float32_probabilities_of_a_large_vocabulary_are_admissible():
    logits = np.random.default_rng(0).normal(0, 3, 152064)
    probs = (np.exp(logits) / np.exp(logits).sum()).astype(np.float32)
    assert check_draft_probs(DraftTokens([17], None, [SparseDistribution([], probs)]), 152064) is None
