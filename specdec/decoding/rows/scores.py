"""Masks, biases, penalties and temperature on one row, in place. The order is the contract's (see `processing`).

Sparse steps touch the listed tokens and those seen, never the whole row. Ids beyond the row are padding: passed over.

Shapes: N scores of a row; S distinct tokens seen in the prompt and the committed output.
"""

import numpy as np

from specdec.decoding.rows.arithmetic import BLOCK, IMPOSSIBLE, Floats, Ids, exact

_LARGEST = float(np.finfo(np.float32).max)


@exact
def keep_only(logits: Floats, allowed: Ids, scores: Floats) -> None:
    """Scores are those of the allowed tokens' logits; every other token is impossible."""
    scores[:] = IMPOSSIBLE
    for index in range(len(allowed)):
        if allowed[index] < len(scores):
            scores[allowed[index]] = logits[allowed[index]]


@exact
def ban(scores: Floats, token_ids: Ids) -> None:
    """Makes these tokens impossible."""
    for index in range(len(token_ids)):
        if token_ids[index] < len(scores):
            scores[token_ids[index]] = IMPOSSIBLE


@exact
def add_biases(scores: Floats, token_ids: Ids, biases: Floats) -> None:
    """Adds each token's bias."""
    for index in range(len(token_ids)):
        if token_ids[index] < len(scores):
            scores[token_ids[index]] += biases[index]


@exact
def penalised(
    score: np.float32, repetition: float, presence: np.float32, frequency: np.float32, count: int
) -> np.float32:
    """The score of a token that was seen, `count` times of them in the output.

    Repetition penalty over prompt and output (Keskar et al., "CTRL"), presence and frequency over the output.
    """
    if repetition != 1.0:
        exactly = np.float64(score)  # a tiny penalty overflows float32
        exactly = exactly / repetition if exactly > 0 else exactly * repetition
        score = np.float32(min(exactly, _LARGEST))
    if count > 0:
        score = np.float32(score - np.float32(np.float32(frequency * np.float32(count)) + presence))
    return score


@exact
def penalise(
    scores: Floats,
    seen: Ids,
    counts: Ids,
    path: Ids,
    path_counts: Ids,
    repetition: float,
    presence: np.float32,
    frequency: np.float32,
    before: Floats,
) -> None:
    """Penalises the tokens seen, and those of a draft's path before this row, once for all times that they were seen.

    Args:
        seen, counts: [S] distinct tokens of prompt and output, and how often the output holds them.
        path, path_counts: [depth] draft tokens before this row, and how often the committed output holds each.
        before: [depth] or more, to work with.
    """
    for index in range(len(path)):
        if path[index] < len(scores):
            before[index] = scores[path[index]]
    for index in range(len(seen)):
        token_id = seen[index]
        if token_id < len(scores):
            scores[token_id] = penalised(scores[token_id], repetition, presence, frequency, counts[index])
    for index in range(len(path)):
        if path[index] < len(scores):
            count = path_counts[index]
            for other in range(len(path)):
                count += path[other] == path[index]
            scores[path[index]] = penalised(before[index], repetition, presence, frequency, count)


@exact
def temper(logits: Floats, temperature: np.float32, scores: Floats, maxima: Floats, best: np.float32) -> None:
    """Divides by the temperature, the best at 0: no temperature is small enough to overflow upwards."""
    for block in range(len(maxima)):
        source = logits[block * BLOCK : (block + 1) * BLOCK]
        target = scores[block * BLOCK : (block + 1) * BLOCK]
        for index in range(len(source)):
            target[index] = (source[index] - best) / temperature
        maxima[block] = (maxima[block] - best) / temperature
