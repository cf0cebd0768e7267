"""The law that an output must follow, computed apart from the code under test: plain Python, one token at a time.

Knows the definitions of the sampling parameters and a toy target; knows nothing of drafts, noise or tensors' tricks.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from specdec.params import SamplingParams

Law = dict[tuple[int, ...], float]


class ToyTarget:
    """Logits that depend on the last two tokens and on the length; the last `num_padding` of its rows are padding.

    Targets of one seed prefer the same tokens, whatever their padding and spread.
    """

    def __init__(self, vocabulary_size: int, num_padding: int = 1, spread: float = 1.2, seed: int = 0) -> None:
        self.vocabulary_size = vocabulary_size
        self._num_rows = vocabulary_size + num_padding
        self._spread = spread
        self._seed = seed
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """[V] float32. Padding rows hold the highest logits of all, so that forgetting them shows."""
        key = (len(prefix), *prefix[-2:])
        if key not in self._known:
            values = np.random.default_rng([self._seed, *key]).normal(0, self._spread, self._num_rows)
            values[self.vocabulary_size :] = 9.0
            self._known[key] = torch.tensor(values, dtype=torch.float32)
        return self._known[key]

    def __call__(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        return torch.stack([self.logits(prefix) for prefix in prefixes])


def next_token_law(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], end_ids: set[int]
) -> list[float]:
    """Probability of each token, by the definitions, in the contract's order."""
    scores = list(logits)
    for token_id in range(len(scores)):
        banned = token_id in params.banned_token_ids
        not_allowed = bool(params.allowed_token_ids) and token_id not in params.allowed_token_ids
        too_early = token_id in end_ids and len(output) < params.min_tokens
        if banned or not_allowed or too_early:
            scores[token_id] = -math.inf
        scores[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            penalty = params.repetition_penalty
            scores[token_id] = scores[token_id] / penalty if scores[token_id] > 0 else scores[token_id] * penalty
        count = Counter(output)[token_id]
        scores[token_id] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    if params.temperature == 0:
        best = max(scores)
        return [float(token_id == scores.index(best)) for token_id in range(len(scores))]
    weights = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    ranking = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    for token_id in ranking[params.top_k :] if params.top_k else []:
        weights[token_id] = 0.0
    total, reached, kept = sum(weights), 0.0, set()
    for token_id in ranking:
        if params.top_p == 1 or reached < params.top_p * total:
            kept.add(token_id)
            reached += weights[token_id]
    weights = [weight if token_id in kept else 0.0 for token_id, weight in enumerate(weights)]
    return [weight / sum(weights) for weight in weights]


def joint_law(
    target: ToyTarget, params: SamplingParams, prompt: Sequence[int], num_tokens: int, end_ids: set[int]
) -> Law:
    """Probability of each output of `num_tokens` tokens: the product of the laws of its tokens. Ends do not end it."""
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        longer: Law = {}
        for output, prob in law.items():
            logits = target.logits([*prompt, *output])[: target.vocabulary_size].tolist()
            for token_id, next_prob in enumerate(next_token_law(logits, params, prompt, output, end_ids)):
                if next_prob > 0:
                    longer[(*output, token_id)] = prob * next_prob
        law = longer
    return law


def chi_square_p_value(observed: Counter[tuple[int, ...]], law: Law) -> float:
    """How likely a sample at least this far from the law is, if the law holds; 0 where it holds something impossible.

    Outcomes that are expected fewer than 5 times are counted together, as the chi-square approximation asks.
    """
    if any(outcome not in law for outcome in observed):
        return 0.0
    num_trials = observed.total()
    cells: list[tuple[float, float]] = []
    rare_observed = rare_expected = 0.0
    for outcome, prob in law.items():
        if num_trials * prob < 5:
            rare_observed, rare_expected = rare_observed + observed[outcome], rare_expected + num_trials * prob
        else:
            cells.append((observed[outcome], num_trials * prob))
    if rare_expected >= 5 or not cells:
        cells.append((rare_observed, rare_expected))
    else:  # too few even together: they join the last cell
        cells[-1] = (cells[-1][0] + rare_observed, cells[-1][1] + rare_expected)
    if len(cells) == 1:
        return 1.0
    counts, expected = zip(*cells, strict=True)
    return float(stats.chisquare(counts, np.array(expected) * (sum(counts) / sum(expected))).pvalue)


def draw_from(probs: Sequence[float], random: Callable[[], float]) -> int:
    """One token, the drafter's way: from `probs`, with its own random numbers in [0, 1)."""
    point, reached = random() * sum(probs), 0.0
    for token_id, prob in enumerate(probs):
        reached += prob
        if point < reached:
            return token_id
    return max(token_id for token_id, prob in enumerate(probs) if prob > 0)
