"""What the compiled rows must do, written plainly: whole rows in numpy, sorted outright, one round at a time.

The order of parameters and the ties are the contract's; nothing here is fast.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise, Purpose
from specdec.params import AcceptanceRule, SamplingParams

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def plain_scores(
    logits: Floats, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], suppressed: Collection[int]
) -> Floats:
    """Scores [N] of one row of logits [N]."""
    scores = logits.copy()
    forbidden = set(params.banned_token_ids) | (set(suppressed) if len(output) < params.min_tokens else set())
    for token_id in range(len(scores)):
        if token_id in forbidden or (params.allowed_token_ids and token_id not in params.allowed_token_ids):
            scores[token_id] = -math.inf
        scores[token_id] += np.float32(params.logit_bias.get(token_id, 0.0))
    counts = Counter(output)
    for token_id in {token_id for token_id in (*prompt, *output) if token_id < len(scores)}:
        score = float(scores[token_id])
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        scores[token_id] = np.float32(min(score, float(np.finfo(np.float32).max)))
        if token_id in counts:
            added = np.float32(params.frequency_penalty) * np.float32(counts[token_id])
            scores[token_id] -= added + np.float32(params.presence_penalty)
    if params.temperature == 0:
        return scores
    if params.temperature != 1:
        scores = (scores - scores.max()) / np.float32(max(params.temperature, np.finfo(np.float32).tiny))
    return _truncated(scores, params)


def _truncated(scores: Floats, params: SamplingParams) -> Floats:
    weights = np.exp((scores - scores.max()).astype(np.float64))
    ranking = [int(token_id) for token_id in np.argsort(-scores, kind="stable")]
    if params.min_p > 0:
        floor = np.float32(scores.max() + np.float32(math.log(params.min_p)))
        ranking = [token_id for token_id in ranking if scores[token_id] >= floor]
    if 0 < params.top_k < len(scores):
        ranking = ranking[: params.top_k]
    if params.top_p < 1:
        reached = weights[ranking].cumsum()
        ranking = ranking[: 1 + int(np.searchsorted(reached, params.top_p * reached[-1]))]
    kept = np.full_like(scores, -math.inf)
    kept[ranking] = scores[ranking]
    return kept


def plain_walk(
    rule: AcceptanceRule, scores: Floats, draft: DraftTokens, noise: Noise, base_position: int
) -> tuple[list[int], int]:
    """Accepted nodes, root first, and the next token. `scores` is [1 + K, N]."""
    accepted: list[int] = []
    row = 0
    while True:
        position = base_position + len(accepted)
        siblings = draft.children_of_row[row]
        if rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED):
            token_id = plain_target_token(rule, scores[row], noise, position)
            node = next((child for child in siblings if draft.token_ids[child] == token_id), None)
        else:
            node, residual = _first_accepted(rule, scores[row], draft, siblings, noise, position)
            purpose = Purpose.RECOVER if siblings else Purpose.TARGET_SAMPLE
            token_id = -1 if node is not None else plain_draw(residual, noise.uniform(position, purpose))
        if node is None:
            return accepted, token_id
        accepted.append(node)
        row = 1 + node


def plain_target_token(rule: AcceptanceRule, scores: Floats, noise: Noise, position: int) -> int:
    """The best token, or the one that every token's Gumbel value makes the best."""
    if rule is AcceptanceRule.GREEDY:
        return int(scores.argmax())
    return int((scores + noise.gumbel(position, None, len(scores)).numpy()).argmax())


def plain_draw(probs: Doubles, uniform: float) -> int:
    """Inversion: the token at `uniform` on the scale of cumulated probabilities."""
    cumulated = probs.cumsum()
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


def _first_accepted(
    rule: AcceptanceRule,
    scores: Floats,
    draft: DraftTokens,
    siblings: Sequence[int],
    noise: Noise,
    position: int,
) -> tuple[int | None, Doubles]:
    target = torch.softmax(torch.from_numpy(scores).double(), -1).numpy()
    residual = target
    for rank, node in enumerate(siblings):
        token_id = draft.token_ids[node]
        draft_probs = _draft_probs(rule, draft, node, len(scores))
        prob = residual[token_id] if token_id < len(residual) else 0.0
        if noise.uniform(position, Purpose.ACCEPT, rank) < prob / draft_probs[token_id]:
            return node, residual
        remaining = np.maximum(residual - draft_probs[: len(residual)], 0)
        if remaining.sum() == 0:
            return None, target
        residual = remaining / remaining.sum()
    return None, residual


def _draft_probs(rule: AcceptanceRule, draft: DraftTokens, node: int, vocabulary_size: int) -> Doubles:
    """Dense, with room for padding ids beyond the vocabulary."""
    dense = np.zeros(max(vocabulary_size, 1 + max(draft.token_ids)))
    if rule is AcceptanceRule.ONE_HOT:
        dense[draft.token_ids[node]] = 1.0
        return dense
    sparse = draft.draft_probs[node]
    token_ids = list(sparse.token_ids) or list(range(len(sparse.probs)))
    dense = np.zeros(max(len(dense), 1 + max(token_ids)))
    dense[token_ids] = sparse.probs
    return dense / dense.sum()
