"""Drafts, and what makes one admissible. A drafter is not trusted: nothing here is believed before it is checked.

Knows shapes, ids and probabilities; knows nothing of positions, epochs or sessions.

Shapes: K draft tokens, or nodes of a tree; V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specdec.messages import RefusalReason, SparseDistribution
from specdec.params import MAX_DRAFT_NODES, AcceptanceRule

SUM_TOLERANCE = 1e-3
"""How far from 1 the sum of a draft distribution may lie: float32 rounding over a large vocabulary, and no more."""


@dataclass(frozen=True)
class DraftTokens:
    """K guessed tokens: a chain, or the nodes of a tree where `parent_indices` is given.

    A parent index is that of a node, or -1 for the last committed token; siblings are tried in the order they stand in.
    `draft_probs` has one distribution per node under `rejection`: the one that the node's token was drawn from.
    """

    token_ids: Sequence[int] = ()
    parent_indices: Sequence[int] | None = None
    draft_probs: Sequence[SparseDistribution] | None = None

    @cached_property
    def parents(self) -> Sequence[int]:
        """[K] parent of each node, a chain's included."""
        return self.parent_indices or range(-1, len(self.token_ids) - 1)

    @cached_property
    def children_of_row(self) -> list[list[int]]:
        """[1 + K] nodes that follow each row of scores: row 0 is the last committed token, row 1 + i is node i."""
        children: list[list[int]] = [[] for _ in range(1 + len(self.token_ids))]
        for node, parent in enumerate(self.parents):
            children[1 + parent].append(node)
        return children

    def path_to(self, node: int) -> list[int]:
        """Token ids from the root's child down to `node`, inclusive."""
        path: list[int] = []
        while node >= 0:
            path.append(self.token_ids[node])
            node = self.parents[node]
        return path[::-1]


def check_draft(draft: DraftTokens, rule: AcceptanceRule, vocabulary_size: int) -> RefusalReason | None:
    """Why the draft must be refused under the rule, or None. `vocabulary_size` counts padding ids: they are legal."""
    if len(draft.token_ids) > MAX_DRAFT_NODES:
        return RefusalReason.TOO_MANY_NODES
    if not all(0 <= token_id < vocabulary_size for token_id in draft.token_ids):
        return RefusalReason.TOKEN_OUT_OF_VOCABULARY
    if (malformed := check_tree(draft)) is not None:
        return malformed
    if rule is AcceptanceRule.REJECTION:
        return check_draft_probs(draft, vocabulary_size)
    return RefusalReason.NOT_ALLOWED_BY_RULE if draft.draft_probs else None


def check_tree(draft: DraftTokens) -> RefusalReason | None:
    """MALFORMED_TREE unless there is one parent for each node and every parent stands before its child."""
    if not draft.parent_indices:
        return None
    well_formed = len(draft.parent_indices) == len(draft.token_ids) and all(
        -1 <= parent < node for node, parent in enumerate(draft.parent_indices)
    )
    return None if well_formed else RefusalReason.MALFORMED_TREE


def check_draft_probs(draft: DraftTokens, vocabulary_size: int) -> RefusalReason | None:
    """Why the draft's distributions must be refused under `rejection`, or None.

    Each is finite, in [0, 1], sums to 1 within SUM_TOLERANCE, names ids of the vocabulary once each, and gives its
    node's token a probability above 0, without which the token cannot have been drawn from it.
    """
    distributions = draft.draft_probs or ()
    if len(distributions) != len(draft.token_ids):
        return RefusalReason.MISSING_PROBABILITY
    for token_id, distribution in zip(draft.token_ids, distributions, strict=True):
        reason = _check_distribution(token_id, distribution, vocabulary_size)
        if reason is not None:
            return reason
    return None


def _check_distribution(token_id: int, distribution: SparseDistribution, vocabulary_size: int) -> RefusalReason | None:
    probs = np.asarray(distribution.probs, dtype=np.float64)
    token_ids = np.asarray(distribution.token_ids, dtype=np.int64)
    if len(probs) == 0:
        return RefusalReason.MISSING_PROBABILITY
    is_full = len(token_ids) == 0
    if not is_full and len(token_ids) != len(probs):
        return RefusalReason.MISSING_PROBABILITY
    if len(probs) > vocabulary_size:
        return RefusalReason.TOKEN_OUT_OF_VOCABULARY
    if not is_full and (token_ids.min() < 0 or token_ids.max() >= vocabulary_size):
        return RefusalReason.TOKEN_OUT_OF_VOCABULARY
    if not is_full and len(np.unique(token_ids)) != len(token_ids):
        return RefusalReason.INVALID_PROBABILITY
    if not np.all((probs >= 0) & (probs <= 1)):  # NaN compares false
        return RefusalReason.INVALID_PROBABILITY
    if abs(float(probs.sum()) - 1) > SUM_TOLERANCE:
        return RefusalReason.UNNORMALISED
    own_prob = probs[token_id : token_id + 1] if is_full else probs[token_ids == token_id]
    return None if len(own_prob) and own_prob[0] > 0 else RefusalReason.MISSING_PROBABILITY
