"""min-p, then top-k, then top-p on one row; the lowest id first among equals. No row is sorted.

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

_NUM_NARROWINGS = 3
"""Each leaves a quarter of the span of scores in which the cut of top-p may be."""

_ALL = np.float32(-np.finfo(np.float32).max)
_NOTHING_ABOVE = np.float32(math.inf)
_NEGLIGIBLE = np.float32(-32.0)
"""150k tokens this far below the best weigh 2e-9 of it: float32 cannot tell."""


@exact
def truncate(
    source: Floats,
    maxima: Floats,
    min_p: float,
    top_k: int,
    top_p: float,
    scores: Floats,
    token_ids: Ids,
    weights: Floats,
    buckets: Doubles,
) -> None:
    """Scores [N] are those of the source [N] that are kept; the maxima of its blocks are brought up to date.

    A block whose maximum is -inf afterwards is impossible as a whole, and its scores are not written.

    Args:
        source: may be `scores` itself.
        min_p: in [0, 1]; 0 is off.
        top_k: below N; 0 is off.
        top_p: in (0, 1]; 1 is off.
        token_ids, weights, buckets: [N], [N] and [DIGIT_BUCKETS], to work with.
    """
    best = block_max(maxima)
    floor = _ALL
    if min_p > 0:
        floor = np.float32(best + np.float32(math.log(min_p)))
    if top_k > 0:
        floor = max(floor, _kth_maximum(maxima, top_k, token_ids, weights, buckets))
    if min_p == 0 and top_k == 0:
        least, last_id = _cut_by_mass(source, maxima, best, top_p, token_ids, weights, buckets)
    else:
        count = _gather(source, maxima, floor, _NOTHING_ABOVE, token_ids)
        least, last_id = floor, np.int32(len(source))
        if top_k > 0:
            weights[:count] = np.float32(1)
            least, last_id = _cut(source, token_ids[:count], weights[:count], 0.0, float(top_k), buckets)
            count = _keep(source, token_ids[:count], least, last_id)
        if top_p < 1:
            whole = 0.0
            for index in range(count):
                weights[index] = exp32(source[token_ids[index]] - best)
                whole += weights[index]
            least, last_id = _cut(source, token_ids[:count], weights[:count], 0.0, top_p * whole, buckets)
    _apply(source, maxima, least, last_id, scores)


@exact
def _cut_by_mass(
    source: Floats,
    maxima: Floats,
    best: np.float32,
    top_p: float,
    token_ids: Ids,
    weights: Floats,
    buckets: Doubles,
) -> tuple[np.float32, np.int32]:
    """The cut of top-p over a whole row: thresholds first narrow down where it must be."""
    visible = np.float32(best + _NEGLIGIBLE)
    whole = _weigh(source, maxima, best, visible, weights)
    needed = top_p * whole
    # All that are less likely than (1 - top_p) / N do not reach 1 - top_p together: the others reach top_p.
    floor = np.float32(best + math.log(whole * (1 - top_p) / (2 * len(source))))  # halved for rounding
    floor = max(floor, visible)
    ceiling, above = _NOTHING_ABOVE, 0.0  # the weight of all that reach the ceiling
    for _ in range(_NUM_NARROWINGS):
        span = np.float32(min(ceiling, best) - floor)
        low = np.float32(floor + np.float32(0.25) * span)
        middle = np.float32(floor + np.float32(0.5) * span)
        high = np.float32(floor + np.float32(0.75) * span)
        from_low, from_middle, from_high = _weights_from(source, maxima, weights, low, middle, high)
        if from_high >= needed:
            floor = high
        elif from_middle >= needed:
            floor, ceiling, above = middle, high, from_high
        elif from_low >= needed:
            floor, ceiling, above = low, middle, from_middle
        else:
            ceiling, above = low, from_low
    count = _gather(source, maxima, floor, ceiling, token_ids)
    if count == 0:  # by rounding: what reaches the ceiling is enough
        return ceiling, np.int32(len(source))
    for index in range(count):
        weights[index] = weights[token_ids[index]]  # ids ascend, so that none is read after it was written
    return _cut(source, token_ids[:count], weights[:count], above, needed, buckets)


@summing
def _weigh(source: Floats, maxima: Floats, best: np.float32, visible: np.float32, weights: Floats) -> float:
    """Fills exp(score - best) of a row, but for blocks in which none is visible; returns the sum."""
    total = 0.0
    for number in range(len(maxima)):
        if maxima[number] >= visible:
            block = source[number * BLOCK : (number + 1) * BLOCK]
            target = weights[number * BLOCK : (number + 1) * BLOCK]
            of_block = np.float32(0)
            for index in range(len(block)):
                weight = exp32(block[index] - best)
                target[index] = weight
                of_block += weight
            total += float(of_block)
    return total


@summing
def _weights_from(
    source: Floats, maxima: Floats, weights: Floats, low: np.float32, middle: np.float32, high: np.float32
) -> tuple[float, float, float]:
    """The weights, together, of the scores that reach each of three thresholds."""
    from_low, from_middle, from_high = 0.0, 0.0, 0.0
    for number in range(len(maxima)):
        if maxima[number] >= low:
            block = source[number * BLOCK : (number + 1) * BLOCK]
            of_block = weights[number * BLOCK : (number + 1) * BLOCK]
            reach_low, reach_middle, reach_high = np.float32(0), np.float32(0), np.float32(0)
            for index in range(len(block)):
                reach_low += of_block[index] if block[index] >= low else np.float32(0)
                reach_middle += of_block[index] if block[index] >= middle else np.float32(0)
                reach_high += of_block[index] if block[index] >= high else np.float32(0)
            from_low += float(reach_low)
            from_middle += float(reach_middle)
            from_high += float(reach_high)
    return from_low, from_middle, from_high


@exact
def _kth_maximum(maxima: Floats, top_k: int, token_ids: Ids, weights: Floats, buckets: Doubles) -> np.float32:
    """A score that at least `top_k` tokens reach: so many blocks hold one. Lower than any where blocks are fewer."""
    if top_k >= len(maxima):
        return _ALL
    for block in range(len(maxima)):
        token_ids[block] = block
        weights[block] = np.float32(1)
    num_blocks = len(maxima)
    return max(_ALL, _cut(maxima, token_ids[:num_blocks], weights[:num_blocks], 0.0, float(top_k), buckets)[0])


@exact
def _gather(scores: Floats, maxima: Floats, floor: np.float32, ceiling: np.float32, token_ids: Ids) -> int:
    """Fills the ids, ascending, of scores in [floor, ceiling); returns how many they are."""
    count = 0
    for number in range(len(maxima)):
        if maxima[number] >= floor:
            first = number * BLOCK
            block = scores[first : first + BLOCK]
            for index in range(len(block)):
                if block[index] >= floor and block[index] < ceiling:
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
    scores: Floats, token_ids: Ids, weights: Floats, above: float, needed: float, buckets: Doubles
) -> tuple[np.float32, np.int32]:
    """The cut that keeps the fewest of the candidates, best first, whose weights reach `needed` together.

    `above` is the weight of tokens that are better than every candidate. Returns the least score kept, and the last id
    kept of those that have it. All candidates of some weight are kept where they do not reach `needed`.
    """
    prefix = np.int32(0)  # the digits of the least rank kept, as far as they are known
    known = np.int32(0)
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
def _apply(source: Floats, maxima: Floats, least: np.float32, last_id: np.int32, scores: Floats) -> None:
    for number in range(len(maxima)):
        if maxima[number] < least:
            maxima[number] = IMPOSSIBLE
            continue
        first = number * BLOCK
        block, target = source[first : first + BLOCK], scores[first : first + BLOCK]
        for index in range(len(block)):
            score = block[index]
            is_kept = score > least or (score == least and first + index <= last_id)
            target[index] = score if is_kept else IMPOSSIBLE
        maxima[number] = block_max(target)
