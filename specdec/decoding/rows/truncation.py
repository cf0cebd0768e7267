"""min-p, then top-k, then top-p on one row, in place; the lowest id first among equals. No row is sorted.

A cut is a score and an id: what scores less, or as much with a higher id, becomes impossible. It is found among the
candidates, few of a row, by radix selection: three passes over the digits of their ranks.

Shapes: N scores of a row, C candidates of it.
"""

import math

import numpy as np

from specdec.decoding.rows.arithmetic import (
    BLOCK,
    IMPOSSIBLE,
    Doubles,
    Floats,
    Ids,
    block_max,
    exact,
    exp32,
    rank_of,
    score_of,
    summing,
)

DIGIT_BUCKETS = 2048
"""Buckets of a digit: 11 bits, so that three digits make a rank."""

_ALL = np.float32(-np.finfo(np.float32).max)
_NEGLIGIBLE = np.float32(-32.0)
"""150k tokens this far below the best weigh 2e-9 of it: float32 cannot tell."""


@exact
def truncate(
    scores: Floats,
    maxima: Floats,
    min_p: float,
    top_k: int,
    top_p: float,
    token_ids: Ids,
    weights: Floats,
    buckets: Doubles,
) -> None:
    """Cuts a row of scores [N], and brings the maxima of its blocks up to date.

    A block whose maximum is -inf afterwards is impossible as a whole: its scores are left as they are.

    Args:
        min_p: in [0, 1]; 0 is off.
        top_k: below N; 0 is off.
        top_p: in (0, 1]; 1 is off.
        token_ids, weights, buckets: [N], [N] and [DIGIT_BUCKETS], to work with.
    """
    best = block_max(maxima)
    floor = _ALL
    whole = -1.0  # weight of all tokens that top-p counts, the best being 1; negative while not known
    if min_p > 0:
        floor = np.float32(best + np.float32(math.log(min_p)))
    if top_k > 0:
        floor = max(floor, _kth_maximum(maxima, top_k, token_ids, weights, buckets))
    if min_p == 0 and top_k == 0:
        # All that are less likely than (1 - top_p) / N do not reach 1 - top_p together: the others reach top_p.
        whole = _weight(scores, maxima, best)
        floor = np.float32(best + math.log(whole * (1 - top_p) / (2 * len(scores))))  # halved for rounding
    count = _gather(scores, maxima, floor, token_ids)
    least, last_id = floor, np.int32(len(scores))
    if top_k > 0:
        weights[:count] = np.float32(1)
        least, last_id = _cut(scores, token_ids[:count], weights[:count], float(top_k), buckets)
        count = _keep(scores, token_ids[:count], least, last_id)
    if top_p < 1:
        for index in range(count):
            weights[index] = exp32(scores[token_ids[index]] - best)
        if whole < 0:
            whole = 0.0
            for index in range(count):
                whole += weights[index]
        least, last_id = _cut(scores, token_ids[:count], weights[:count], top_p * whole, buckets)
    _apply(scores, maxima, least, last_id)


@summing
def _weight(scores: Floats, maxima: Floats, best: np.float32) -> float:
    """Sum of exp(score - best) over a row."""
    total = 0.0
    for number in range(len(maxima)):
        if maxima[number] - best >= _NEGLIGIBLE:
            block = scores[number * BLOCK : (number + 1) * BLOCK]
            of_block = np.float32(0)
            for index in range(len(block)):
                of_block += exp32(block[index] - best)
            total += float(of_block)
    return total


@exact
def _kth_maximum(maxima: Floats, top_k: int, token_ids: Ids, weights: Floats, buckets: Doubles) -> np.float32:
    """A score that at least `top_k` tokens reach: so many blocks hold one. Lower than any where blocks are fewer."""
    if top_k >= len(maxima):
        return _ALL
    for block in range(len(maxima)):
        token_ids[block] = block
        weights[block] = np.float32(1)
    num_blocks = len(maxima)
    return max(_ALL, _cut(maxima, token_ids[:num_blocks], weights[:num_blocks], float(top_k), buckets)[0])


@exact
def _gather(scores: Floats, maxima: Floats, floor: np.float32, token_ids: Ids) -> int:
    """Fills the ids, ascending, of scores that are not below the floor; returns how many they are."""
    count = 0
    for number in range(len(maxima)):
        if maxima[number] >= floor:
            first = number * BLOCK
            block = scores[first : first + BLOCK]
            for index in range(len(block)):
                if block[index] >= floor:
                    token_ids[count] = first + index
                    count += 1
    return count


@exact
def _keep(scores: Floats, token_ids: Ids, least: np.float32, last_id: np.int32) -> int:
    """Moves the candidates that a cut keeps to the front; returns how many they are."""
    count = 0
    for index in range(len(token_ids)):
        token_id = token_ids[index]
        if scores[token_id] > least or (scores[token_id] == least and token_id <= last_id):
            token_ids[count] = token_id
            count += 1
    return count


@exact
def _cut(
    scores: Floats, token_ids: Ids, weights: Floats, needed: float, buckets: Doubles
) -> tuple[np.float32, np.int32]:
    """The cut that keeps the fewest of the candidates, best first, whose weights reach `needed` together.

    Returns the least score kept, and the last id kept of those that have it. All are kept where they do not reach it.
    """
    prefix = np.int32(0)  # the digits of the least rank kept, as far as they are known
    known = np.int32(0)
    above = 0.0  # weight of the candidates of greater ranks
    for shift in (21, 10, 0):
        last_bucket = DIGIT_BUCKETS - 1 if shift > 0 else 1023
        for bucket in range(last_bucket + 1):
            buckets[bucket] = 0.0
        for index in range(len(token_ids)):
            rank = _unsigned_rank(scores[token_ids[index]])
            if (rank & known) == prefix:
                buckets[(rank >> np.int32(shift)) & np.int32(last_bucket)] += weights[index]
        digit = -1
        for bucket in range(last_bucket, -1, -1):
            if buckets[bucket] > 0:
                above += buckets[digit] if digit >= 0 else 0.0
                digit = bucket
                if above + buckets[bucket] >= needed:
                    break
        prefix |= np.int32(digit << shift)
        known |= np.int32(last_bucket << shift)
    least = score_of(np.int32(prefix ^ np.int32(-0x80000000)))
    last_id = np.int32(-1)
    for index in range(len(token_ids)):
        if scores[token_ids[index]] == least and above < needed:
            above += weights[index]
            last_id = token_ids[index]
    return least, last_id


@exact
def _unsigned_rank(score: np.float32) -> np.int32:
    """`rank_of`, its 32 bits to be read as an unsigned number; 0 and -0, which are equal, have the same."""
    return np.int32(rank_of(np.float32(score + np.float32(0))) ^ np.int32(-0x80000000))


@exact
def _apply(scores: Floats, maxima: Floats, least: np.float32, last_id: np.int32) -> None:
    for number in range(len(maxima)):
        if maxima[number] < least:
            maxima[number] = IMPOSSIBLE
            continue
        first = number * BLOCK
        block = scores[first : first + BLOCK]
        for index in range(len(block)):
            score = block[index]
            if score < least or (score == least and first + index > last_id):
                block[index] = IMPOSSIBLE
        maxima[number] = block_max(block)
