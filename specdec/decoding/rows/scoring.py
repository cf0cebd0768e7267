"""The kernel that makes scores of logits, and the making of one row's, which the deciding kernel shares.

Shapes: R rows, N vocabulary_size, B blocks of a row; T threads.
"""

from typing import Any

import numpy as np
from numba import carray

from specdec import openmp
from specdec.decoding.rows.arithmetic import BLOCK, IMPOSSIBLE, Floats, block_maxima, exact
from specdec.decoding.rows.records import BATCH, GREEDY, ROUND
from specdec.decoding.rows.scores import add_biases, ban, keep_only, penalise, temper
from specdec.decoding.rows.truncation import DIGIT_BUCKETS, truncate


@exact
def score_row(batch: Any, round_: Any, row: int, depth: int, scores: Floats, maxima: Floats, part: int) -> Floats:
    """The scores [N] of a row, and the maxima of its blocks; the logits themselves where no parameter is on.

    A block whose maximum is -inf is impossible as a whole: its scores are not to be looked at. So are all blocks where
    the logits are not finite.
    """
    num_tokens = batch.vocabulary_size
    all_logits = carray(openmp.pointer(batch.logits), (batch.num_rows, batch.row_stride), np.float32)
    logits = all_logits[row, :num_tokens]
    floats = carray(openmp.pointer(batch.floats), (batch.num_threads, 3, len(maxima) * BLOCK), np.float32)
    edited = floats[part, 2, :num_tokens]  # apart from `scores`: a step from one array to another is vectorised
    listed = carray(openmp.pointer(batch.listed_ids), (batch.num_listed,), np.int32)
    end_allowed = round_.first_listed + round_.num_allowed
    end_banned = end_allowed + round_.num_banned
    end_suppressed = end_banned + round_.num_suppressed
    end_biased = end_suppressed + round_.num_biased
    is_penalised = round_.num_seen > 0 or (depth > 0 and round_.penalises)
    is_edited = end_biased > round_.first_listed or is_penalised
    if round_.num_allowed > 0:
        keep_only(logits, listed[round_.first_listed : end_allowed], edited)
    elif is_edited:
        edited[:] = logits
    if is_edited:
        ban(edited, listed[end_allowed:end_banned])
        if depth < round_.num_early:
            ban(edited, listed[end_banned:end_suppressed])
        biases = carray(openmp.pointer(batch.listed_biases), (batch.num_listed,), np.float32)
        add_biases(edited, listed[end_suppressed:end_biased], biases[end_suppressed:end_biased])
        logits = edited
    if is_penalised:
        paths = carray(openmp.pointer(batch.paths), (batch.num_threads, 2, batch.num_nodes), np.int32)
        path_scores = carray(openmp.pointer(batch.path_scores), (batch.num_threads, batch.num_nodes), np.float32)
        penalise(
            edited,
            carray(openmp.pointer(round_.seen_ids), (round_.num_seen,), np.int32),
            carray(openmp.pointer(round_.seen_counts), (round_.num_seen,), np.int32),
            paths[part, 0, :depth],
            paths[part, 1, :depth],
            round_.repetition_penalty,
            round_.presence_penalty,
            round_.frequency_penalty,
            path_scores[part],
        )
    best = block_maxima(logits, maxima)
    if not abs(best) < np.inf:
        maxima[:] = IMPOSSIBLE
        return logits  # type: ignore[no-any-return]
    truncates = round_.rule != GREEDY and (round_.min_p > 0 or round_.top_k > 0 or round_.top_p < 1)
    if round_.rule != GREEDY and round_.temperature != 1:
        temper(logits, round_.temperature, scores, maxima, best)
        logits = scores
    if truncates:
        candidates = carray(openmp.pointer(batch.candidates), (batch.num_threads, len(maxima) * BLOCK), np.int32)
        buckets = carray(openmp.pointer(batch.buckets), (batch.num_threads, DIGIT_BUCKETS), np.float64)
        truncate(
            logits,
            maxima,
            round_.min_p,
            round_.top_k,
            round_.top_p,
            scores,
            candidates[part],
            floats[part, 1],
            buckets[part],
        )
        logits = scores
    return logits  # type: ignore[no-any-return]


@openmp.kernel(BATCH)
def score_rows(arguments: Any) -> None:
    """Scores [R, N] of rounds without drafts, a row for each."""
    batch = carray(arguments, 1)[0]
    rounds = carray(openmp.pointer(batch.rounds), (batch.num_rounds,), ROUND)
    all_scores = carray(openmp.pointer(batch.scores), (batch.num_rounds, batch.vocabulary_size), np.float32)
    num_blocks = (batch.vocabulary_size + BLOCK - 1) // BLOCK
    all_maxima = carray(openmp.pointer(batch.maxima), (batch.num_threads, num_blocks), np.float32)
    part = openmp.part_index()
    for index in range(part, batch.num_rounds, openmp.num_parts()):
        scores, maxima = all_scores[index], all_maxima[part]
        made = score_row(batch, rounds[index], rounds[index].first_row, 0, scores, maxima, part)
        for number in range(num_blocks):
            block = scores[number * BLOCK : (number + 1) * BLOCK]
            if maxima[number] == IMPOSSIBLE:
                block[:] = IMPOSSIBLE
            else:
                block[:] = made[number * BLOCK : (number + 1) * BLOCK]
