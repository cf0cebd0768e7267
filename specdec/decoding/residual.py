"""`one_hot` and `rejection`: a draft token is accepted by chance, and what it leaves of the target makes up for it.

At each depth the siblings are tried in order against the residual r, at first the target's distribution. A sibling x
that was drawn from d is accepted when u < r[x] / d[x], strict, u in [0, 1) its own number; else r becomes normalised
max(r - d, 0) for the next sibling, or for the draw of the next token where there is none. Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", section 2.3 and appendix A.1; for siblings, Miao et al.,
"SpecInfer", section 4.3. `one_hot` is the same with d = 1 at x alone: accepted when u < r[x], else x is struck out.

Shapes: K draft tokens, V vocabulary; row 0 of scores follows the last committed token, row 1 + i follows node i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise, Purpose
from specdec.decoding.processing import target_probs
from specdec.decoding.sampling import Doubles, draw
from specdec.messages import SparseDistribution


@dataclass(frozen=True)
class _DraftDistribution:
    """What a node's token was drawn from: `probs` of `token_ids`, sum 1, every other token 0."""

    token_ids: NDArray[np.int64]
    probs: Doubles

    def prob_of(self, token_id: int) -> float:
        return float(self.probs[self.token_ids == token_id].sum())

    def subtract_from(self, residual: Doubles) -> Doubles | None:
        """Normalised max(residual - draft_probs, 0), [V]; None where that is all zero."""
        known = self.token_ids < len(residual)  # padding ids are the drafter's alone: the target gives them nothing
        remaining = residual.copy()
        remaining[self.token_ids[known]] -= self.probs[known]
        np.maximum(remaining, 0, out=remaining)
        total = remaining.sum()
        return remaining / total if total > 0 else None


def one_hot_distributions(draft: DraftTokens) -> list[SparseDistribution]:
    """Distributions of a drafter that had no choice: all on the node's own token."""
    return [SparseDistribution((token_id,), (1.0,)) for token_id in draft.token_ids]


def walk_residual(
    scores: Tensor, draft: DraftTokens, draft_probs: Sequence[SparseDistribution], noise: Noise, base_position: int
) -> tuple[list[int], int]:
    """Accepted nodes, root first, and the token after them. `scores` is [1 + K, V].

    A token drawn from a residual takes its number from Purpose.RECOVER; one drawn from the target, because no draft
    stood in its place, from Purpose.TARGET_SAMPLE. A position is decided once, so no number serves twice.
    """
    accepted_nodes: list[int] = []
    row = 0
    while True:
        position = base_position + len(accepted_nodes)
        siblings = draft.children_of_row[row]
        node, residual = _try_siblings(_row_probs(scores[row]), siblings, draft, draft_probs, noise, position)
        if node is None:
            purpose = Purpose.RECOVER if siblings else Purpose.TARGET_SAMPLE
            return accepted_nodes, draw(residual, noise.uniform(position, purpose))
        accepted_nodes.append(node)
        row = 1 + node


def _try_siblings(
    target: Doubles,
    siblings: Sequence[int],
    draft: DraftTokens,
    draft_probs: Sequence[SparseDistribution],
    noise: Noise,
    position: int,
) -> tuple[int | None, Doubles]:
    """The first sibling that is accepted, if one is, and the residual that those before it left."""
    residual = target
    for rank, node in enumerate(siblings):
        token_id = draft.token_ids[node]
        residual_prob = residual[token_id] if token_id < len(residual) else 0.0
        distribution = _distribution(draft_probs[node])
        # u < r / d without the division: where r is 0, nothing passes, whatever d is.
        if noise.uniform(position, Purpose.ACCEPT, rank) * distribution.prob_of(token_id) < residual_prob:
            return node, residual
        remaining = distribution.subtract_from(residual)
        if remaining is None:  # the draft was the target, but for rounding
            return None, target
        residual = remaining
    return None, residual


def _distribution(sparse: SparseDistribution) -> _DraftDistribution:
    """Sums to 1 in double precision: the wire's float32 do so within 1e-3 only, and the rest would be a bias."""
    probs = np.asarray(sparse.probs, dtype=np.float64)
    token_ids = np.asarray(sparse.token_ids, dtype=np.int64) if len(sparse.token_ids) else np.arange(len(probs))
    return _DraftDistribution(token_ids, probs / probs.sum())


def _row_probs(scores: Tensor) -> Doubles:
    """Target probabilities of one row, [V]."""
    probs = target_probs(scores[None])[0].cpu().numpy().astype(np.float64)
    normalised: Doubles = probs / probs.sum()
    return normalised
