"""`one_hot` and `rejection` in one row: a draft token is accepted by chance, and what it leaves makes up for it.

The siblings that follow a row are tried in order against the residual r, at first the target's distribution. A sibling
x that was drawn from d is accepted when u < r[x] / d[x], strict, u in [0, 1) its own number; else r becomes normalised
max(r - d, 0) for the next sibling, or for the draw of the next token where there is none. Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", section 2.3 and appendix A.1; for siblings, Miao et al.,
"SpecInfer", section 4.3. `one_hot` is the same with d = 1 at x alone: accepted when u < r[x], else x is struck out.

The residual is kept as weights, the target's best token at 1, and their sums by block; it is never normalised.

Shapes: N scores of a row; D tokens that a sibling's distribution names.
"""

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
    summing,
)


@summing
def weigh(scores: Floats, maxima: Floats, weights: Floats, sums: Doubles) -> float:
    """Fills the target's probabilities in units of the best token's, and their sums by block; returns their sum."""
    best = block_max(maxima)
    total = 0.0
    for number in range(len(maxima)):
        source = scores[number * BLOCK : (number + 1) * BLOCK]
        target = weights[number * BLOCK : (number + 1) * BLOCK]
        of_block = np.float32(0)
        if maxima[number] > IMPOSSIBLE:
            for index in range(len(source)):
                target[index] = exp32(source[index] - best)
            for index in range(len(source)):
                of_block += target[index]
        else:
            target[:] = np.float32(0)
        sums[number] = float(of_block)
        total += float(of_block)
    return total


@exact
def passes(weights: Floats, total: float, token_id: int, draft_prob: float, uniform: float) -> bool:
    """u < r / d without the divisions: where r is 0, nothing passes, whatever d is."""
    return token_id < len(weights) and uniform * draft_prob * total < weights[token_id]


@exact
def subtract(weights: Floats, sums: Doubles, total: float, token_ids: Ids, draft_probs: Doubles) -> float:
    """Takes a rejected sibling's distribution [D] from the residual; returns the sum of what is left, 0 for nothing."""
    for index in range(len(token_ids)):
        token_id = token_ids[index]
        if token_id < len(weights):  # padding ids are the drafter's alone: the target gives them nothing
            weights[token_id] = np.float32(max(weights[token_id] - draft_probs[index] * total, 0.0))
    previous = -1
    for index in range(len(token_ids)):
        number = token_ids[index] // BLOCK
        if number != previous and number < len(sums):
            block = weights[number * BLOCK : (number + 1) * BLOCK]
            sums[number] = 0.0
            for place in range(len(block)):
                sums[number] += block[place]
        previous = number
    left = 0.0
    for number in range(len(sums)):
        left += sums[number]
    return left


@exact
def draw(weights: Floats, sums: Doubles, total: float, uniform: float) -> int:
    """The token that `uniform` in [0, 1) points at on the scale of cumulated weights (inversion).

    Strict, so that a token of weight 0 is never drawn.
    """
    point = uniform * total
    reached = 0.0
    last = -1  # the last block that has a weight: rounding may leave the point at its end
    for number in range(len(sums)):
        if sums[number] > 0:
            last = number
            if reached + sums[number] > point:
                break
            reached += sums[number]
    first = last * BLOCK
    block = weights[first : first + BLOCK]
    token_id = -1
    for index in range(len(block)):
        if block[index] > 0:
            token_id = first + index
            reached += block[index]
            if reached > point:
                break
    return token_id
