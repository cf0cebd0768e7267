"""The kernel behind log-probabilities: log-sum-exp of a row in double precision, and its most likely tokens.

Shapes: R rows asked about, N vocabulary_size, A alternatives of each, B blocks of a row; T threads.
"""

import math
from typing import Any

import numpy as np
from numba import carray

from specdec import openmp
from specdec.decoding.rows.arithmetic import (
    BLOCK,
    IMPOSSIBLE,
    Floats,
    block_max,
    block_maxima,
    exact,
    exp64,
    rank_of,
    score_of,
    summing,
)

_INVISIBLE = np.float32(-50.0)
"""150k tokens this far below the best are less than half a unit in the last place of their sum with it."""

LIKELY = np.dtype(
    [
        ("vocabulary_size", np.int64),
        ("num_logit_rows", np.int64),
        ("row_stride", np.int64),
        ("logits", np.uintp),  # [num_logit_rows, row_stride] float32
        ("num_asked", np.int64),
        ("rows", np.uintp),  # [R] int64
        ("token_ids", np.uintp),  # [R] int64
        ("logprobs", np.uintp),  # [R] float64: out
        ("num_alternatives", np.int64),
        ("alternative_ids", np.uintp),  # [R, A] int64: out
        ("alternative_logprobs", np.uintp),  # [R, A] float64: out
        ("num_threads", np.int64),
        ("maxima", np.uintp),  # [T, B] float32
    ],
    align=True,
)


@summing
def _total(row: Floats, maxima: Floats, best: float) -> float:
    """Sum of exp(score - best)."""
    total = 0.0
    for number in range(len(maxima)):
        if maxima[number] - best >= _INVISIBLE:
            block = row[number * BLOCK : (number + 1) * BLOCK]
            for index in range(len(block)):
                total += exp64(np.float64(block[index]) - best)
    return total


@exact
def _comes_after(score: np.float32, token_id: int, before: np.float32, id_before: int) -> bool:
    return bool(score < before or (score == before and token_id > id_before))


@exact
def _next_likely(row: Floats, maxima: Floats, score: np.float32, token_id: int) -> tuple[np.float32, int]:
    """The token after this one in the order of likelihood, the lowest id first among equals.

    `maxima` are those of what comes after this one, and are kept so.
    """
    best = block_max(maxima)
    for number in range(len(maxima)):
        if maxima[number] == best:
            first = number * BLOCK
            block = row[first : first + BLOCK]
            found = -1
            rest = rank_of(IMPOSSIBLE)
            for index in range(len(block)):
                if _comes_after(block[index], first + index, score, token_id):
                    if found < 0 and block[index] == best:
                        found = first + index
                    else:
                        rest = max(rest, rank_of(block[index]))
            maxima[number] = score_of(rest)
            return best, found
    return IMPOSSIBLE, -1


@openmp.kernel(LIKELY)
def find_logprobs(arguments: Any) -> None:
    """Log-probabilities of one token and of the most likely ones in each row asked about."""
    batch = carray(arguments, 1)[0]
    num_asked, num_alternatives = batch.num_asked, batch.num_alternatives
    logits = carray(openmp.pointer(batch.logits), (batch.num_logit_rows, batch.row_stride), np.float32)
    rows = carray(openmp.pointer(batch.rows), (num_asked,), np.int64)
    token_ids = carray(openmp.pointer(batch.token_ids), (num_asked,), np.int64)
    logprobs = carray(openmp.pointer(batch.logprobs), (num_asked,), np.float64)
    other_ids = carray(openmp.pointer(batch.alternative_ids), (num_asked, num_alternatives), np.int64)
    other_logprobs = carray(openmp.pointer(batch.alternative_logprobs), (num_asked, num_alternatives), np.float64)
    num_blocks = (batch.vocabulary_size + BLOCK - 1) // BLOCK
    all_maxima = carray(openmp.pointer(batch.maxima), (batch.num_threads, num_blocks), np.float32)
    maxima = all_maxima[openmp.part_index()]
    for index in range(openmp.part_index(), num_asked, openmp.num_parts()):
        row = logits[rows[index], : batch.vocabulary_size]
        best = np.float64(block_maxima(row, maxima))
        log_total = math.log(_total(row, maxima, best))
        is_token = token_ids[index] < batch.vocabulary_size  # padding has no probability
        logprobs[index] = (row[token_ids[index]] - best) - log_total if is_token else -math.inf
        score, token_id = np.float32(math.inf), -1
        for place in range(num_alternatives):
            score, token_id = _next_likely(row, maxima, score, token_id)
            other_ids[index, place] = token_id
            other_logprobs[index, place] = (score - best) - log_total
