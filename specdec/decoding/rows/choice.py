"""The target's own token in one row: the best, or the one that the noise makes the best.

Shapes: N scores of a row, -inf where a token is impossible. A block whose maximum is -inf is impossible as a whole.
"""

import math

import numpy as np

from specdec.decoding.noise import GAMMA, MAX_GUMBEL, MULTIPLIER_1, MULTIPLIER_2, gumbel_of, splitmix64
from specdec.decoding.rows.arithmetic import BLOCK, IMPOSSIBLE, Floats, bits_of_float64, block_max, exact

_SIGN = np.uint64(1 << 63)
_LN2 = math.log(2)
_MARGIN = 1e-9
"""More than rounding can take from a bound."""


@exact
def best_token(scores: Floats, maxima: Floats) -> int:
    """The lowest id among those of the highest score; -1 where none is possible."""
    best = block_max(maxima)
    if best == IMPOSSIBLE:
        return -1
    for number in range(len(maxima)):
        if maxima[number] == best:
            first = number * BLOCK
            block = scores[first : first + BLOCK]
            for index in range(len(block)):
                if block[index] == best:
                    return first + index
    return -1


@exact
def coupled_token(scores: Floats, maxima: Floats, key: np.uint64) -> int:
    """argmax(score + gumbel), the lowest id among equals; -1 where none is possible.

    A block is looked into only if its best score with its best noise could win, by a bound that takes no logarithm.
    """
    token_id = best_token(scores, maxima)
    if token_id < 0:
        return -1
    to_beat = scores[token_id] + gumbel_of(key, token_id)
    for number in range(len(maxima)):
        if maxima[number] + MAX_GUMBEL < to_beat or maxima[number] + _luckiest(key, number) < to_beat:
            continue
        first = number * BLOCK
        block = scores[first : first + BLOCK]
        for index in range(len(block)):
            candidate = first + index
            if block[index] + _bound(splitmix64(key, candidate)) < to_beat:  # most often: -inf never passes
                continue
            perturbed = block[index] + gumbel_of(key, candidate)
            if perturbed > to_beat or (perturbed == to_beat and candidate < token_id):
                token_id, to_beat = candidate, perturbed
    return token_id


@exact
def _luckiest(key: np.uint64, block: int) -> float:
    """A bound on the Gumbel values of a block's tokens.

    SplitMix64 but for its last step, which leaves the upper bits alone: the bound reads no more than those.
    """
    state = np.uint64(block * BLOCK) * GAMMA + key
    most = np.int64(-0x8000000000000000)
    for _ in range(BLOCK):
        state += GAMMA
        bits = state
        bits ^= bits >> np.uint64(30)
        bits *= MULTIPLIER_1
        bits ^= bits >> np.uint64(27)
        bits *= MULTIPLIER_2
        most = max(most, np.int64(bits ^ _SIGN))
    return _bound(np.uint64(most) ^ _SIGN)


@exact
def _bound(bits: np.uint64) -> float:
    """A bound on the Gumbel value of these bits, by the upper 31 of them: -log(-log u) <= -log(1 - u).

    1 - u >= n / 2^31; and log2(n) is at least what the bits of n as a double say when they are read as a fixed-point
    number, because the logarithm is concave between powers of 2.
    """
    steps = np.int64(0x7FFFFFFF) - np.int64(bits >> np.uint64(33))
    if steps == 0:
        return MAX_GUMBEL + _MARGIN
    log2 = np.float64(bits_of_float64(np.float64(steps))) * 2.0**-52 - 1023.0
    return (31.0 - log2) * _LN2 + _MARGIN
