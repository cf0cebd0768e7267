"""The three ways to take one token from one row: the best, the noisiest, and the one that a uniform number points at.

Rows are handled in numpy on the CPU: a row of 150k scores is too small for torch's threads, which share their cores
with other processes.

Shapes: V vocabulary; scores [V] float32, -inf where a token is impossible, at least one possible.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.noise import MAX_GUMBEL, MIN_GUMBEL, Noise

Doubles = NDArray[np.float64]

_GUMBEL_SPAN = MAX_GUMBEL - MIN_GUMBEL + 1  # one more, for the rounding of float32 scores

_MANY = 4096
"""Candidates whose noise is made outright; of more, only those near the best or lucky get a logarithm."""

_NEAR = 4.0
"""Of 150k tokens further than this below the best, some 1000 are lucky enough to be looked at. Any value is exact."""


def best_token(scores: Tensor) -> int:
    """The lowest id among those of the highest score."""
    return int(scores.numpy().argmax()) if scores.device.type == "cpu" else int(scores.argmax())


def coupled_token(scores: Tensor, noise: Noise, position: int) -> int:
    """The target's own sample at `position`: argmax(log target_probs + gumbel), the lowest id among equals.

    Scores differ from log target_probs by one constant, which moves no argmax. A token further below the best than
    Gumbel values reach cannot win, so it needs no noise; one that top-k, top-p or min-p cut is at -inf and among those.
    """
    row = scores.cpu().numpy()
    candidates = np.flatnonzero(row >= row.max() - _GUMBEL_SPAN)  # [C], ascending
    if len(candidates) > _MANY:
        candidates = _near_or_lucky(row, noise, position)
    return int(candidates[_perturbed(row, candidates, noise, position).argmax()])


def _near_or_lucky(row: NDArray[np.float32], noise: Noise, position: int) -> NDArray[np.int64]:
    """The tokens that may win, ascending: those near the best, and those whose noise makes up for the distance."""
    least_near = row.max() - np.float32(_NEAR)
    near = np.flatnonzero(row >= least_near)
    to_beat = _perturbed(row, near, noise, position).max()
    lucky = noise.lucky_token_ids(position, float(to_beat - np.float64(least_near)), len(row))
    return np.sort(np.concatenate((near, lucky)))  # a token may stand there twice: no harm


def _perturbed(row: NDArray[np.float32], token_ids: NDArray[np.int64], noise: Noise, position: int) -> Doubles:
    gumbel: Doubles = noise.gumbel(position, torch.from_numpy(token_ids), len(row)).numpy()
    return row[token_ids] + gumbel


def draw(probs: Doubles, uniform: float) -> int:
    """The token that `uniform` in [0, 1) points at on the scale of cumulated probabilities (inversion).

    `probs` [V] need not sum to 1. Strict, so that a token of probability 0 is never drawn.
    """
    cumulated = probs.cumsum()
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
