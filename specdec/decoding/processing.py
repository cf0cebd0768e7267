"""From logits to scores: every sampling parameter, at every position, with the history that is that position's own.

The order is the contract's: allowed and banned tokens, min_tokens, logit bias; repetition, presence and frequency
penalties; temperature; min-p; top-k; top-p. Scores are log-probabilities but for one constant per row, and -inf where a
token is impossible. Knows no rule: what the scores are for is `acceptance`'s business.

Shapes: R rows, V logit rows of the model (padding included), N vocabulary_size, C candidates of one row.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import InvalidParameterError
from specdec.params import SamplingParams

Scores = NDArray[np.float32]

IMPOSSIBLE = -math.inf
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids_per_row: Sequence[Sequence[int]],
    suppressed_token_ids: Collection[int],
    vocabulary_size: int,
) -> Tensor:
    """Scores [R, N] float32 of logits [R, V]. Never writes to the logits.

    Where no parameter is on they are a view of the logits, wherever those are; else a copy on the CPU, made in numpy:
    rows are too small for torch's threads, which share their cores with other processes.

    Args:
        logits: float32, finite.
        params: validated for `vocabulary_size`, and left a token by `require_possible_token`.
        prompt_token_ids: history for the repetition penalty alone.
        output_token_ids_per_row: for each row all output tokens before it, the draft tokens on its path included.
        suppressed_token_ids: tokens that end an output; impossible in rows with fewer than min_tokens before them.
        vocabulary_size: ids from here on are padding and have no scores at all.
    """
    scores = logits[:, :vocabulary_size]
    suppressed_rows = _rows_below_min_tokens(params, output_token_ids_per_row) if suppressed_token_ids else []
    truncates = params.min_p > 0 or 0 < params.top_k < vocabulary_size or params.top_p < 1
    reshapes = params.temperature > 0 and (params.temperature != 1 or truncates)
    if not (suppressed_rows or reshapes or _masks_or_biases(params) or _penalises(params)):
        return scores
    rows = scores.cpu().numpy().astype(np.float32)  # [R, N], a copy
    _mask_and_bias(rows, params, suppressed_rows, sorted(suppressed_token_ids))
    if _penalises(params):
        _penalise(rows, params, prompt_token_ids, output_token_ids_per_row)
    if params.temperature > 0:
        _temper(rows, params.temperature)
        if truncates:
            for row in rows:
                _truncate(row, params)
    return torch.from_numpy(rows)


def target_probs(scores: Tensor) -> Tensor:
    """Probabilities [R, N] float32 of scores [R, N]."""
    return torch.softmax(scores, dim=-1)


def require_possible_token(params: SamplingParams, suppressed_token_ids: Collection[int], vocabulary_size: int) -> None:
    """Raises InvalidParameterError where allowed, banned and suppressed tokens together leave no token at all."""
    impossible = set(params.banned_token_ids) | (set(suppressed_token_ids) if params.min_tokens > 0 else set())
    if params.allowed_token_ids:
        is_possible = not impossible.issuperset(params.allowed_token_ids)
    else:
        is_possible = len(impossible) < vocabulary_size
    if not is_possible:
        field = "allowed_token_ids" if params.allowed_token_ids else "banned_token_ids"
        raise InvalidParameterError(f"{field}: no token is left that may be produced", field=field)


def _rows_below_min_tokens(params: SamplingParams, outputs: Sequence[Sequence[int]]) -> list[int]:
    return [row for row, output in enumerate(outputs) if len(output) < params.min_tokens]


def _masks_or_biases(params: SamplingParams) -> bool:
    return bool(params.allowed_token_ids or params.banned_token_ids or params.logit_bias)


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _mask_and_bias(
    rows: Scores, params: SamplingParams, suppressed_rows: list[int], suppressed_token_ids: list[int]
) -> None:
    if params.allowed_token_ids:
        forbidden = np.ones(rows.shape[1], dtype=bool)
        forbidden[list(params.allowed_token_ids)] = False
        rows[:, forbidden] = IMPOSSIBLE
    rows[:, list(params.banned_token_ids)] = IMPOSSIBLE
    for row in suppressed_rows:
        rows[row, suppressed_token_ids] = IMPOSSIBLE
    rows[:, list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=np.float32)


def _penalise(rows: Scores, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
    """Repetition penalty over prompt and output (Keskar et al., "CTRL"), presence and frequency over the output."""
    num_tokens = rows.shape[1]  # history may hold padding ids, which have no score to penalise
    in_prompt = {token_id for token_id in prompt if token_id < num_tokens}
    _penalise_repetition(rows, list(in_prompt), params.repetition_penalty)
    for row, output in zip(rows, outputs, strict=True):
        counts = {token_id: count for token_id, count in Counter(output).items() if token_id < num_tokens}
        _penalise_repetition(row, list(counts.keys() - in_prompt), params.repetition_penalty)
        num_seen = np.array(list(counts.values()), dtype=np.float32)  # [tokens seen]
        row[list(counts)] -= params.frequency_penalty * num_seen + params.presence_penalty


def _penalise_repetition(scores: Scores, token_ids: list[int], penalty: float) -> None:
    """Divides positive and multiplies other scores [..., N] of the token ids, in place."""
    if penalty != 1:
        seen = scores[..., token_ids].astype(np.float64)  # a tiny penalty overflows float32
        scores[..., token_ids] = np.where(seen > 0, seen / penalty, seen * penalty).clip(max=_LARGEST)


def _temper(rows: Scores, temperature: float) -> None:
    """Divides by the temperature, the best at 0: no temperature is small enough to overflow upwards."""
    if temperature != 1:
        rows -= rows.max(axis=-1, keepdims=True)
        with np.errstate(over="ignore"):  # -inf: impossible at this temperature
            rows /= np.float32(max(temperature, _SMALLEST_TEMPERATURE))


def _truncate(row: Scores, params: SamplingParams) -> None:
    """min-p, then top-k, then top-p on one row [N], in place; the lowest id first among equals.

    Only candidates are sorted. Top-p alone needs none that is less likely than (1 - top_p) / N: all of those together
    do not reach 1 - top_p, so that the others reach top_p without them.
    """
    num_tokens = len(row)
    top_k = params.top_k if 0 < params.top_k < num_tokens else 0
    best = row.max()
    floor = -_LARGEST
    whole_mass = None  # in units of the best token's probability; None: that of the candidates
    if params.min_p > 0:
        floor = best + math.log(params.min_p)
    if top_k > 0:
        floor = max(floor, np.partition(row, num_tokens - top_k)[num_tokens - top_k])
    if params.min_p == 0 and top_k == 0:
        whole_mass = np.exp(row - best).sum(dtype=np.float64)
        floor = best + math.log(whole_mass * (1 - params.top_p) / (2 * num_tokens))  # halved for rounding
    ranked = np.sort(row[row >= floor])[::-1][: top_k or None]  # [C] scores of candidates, best first
    num_kept = len(ranked)
    if params.top_p < 1:
        mass = np.exp((ranked - best).astype(np.float64)).cumsum()
        needed = params.top_p * (mass[-1] if whole_mass is None else whole_mass)
        num_kept = min(num_kept, 1 + int(np.searchsorted(mass, needed)))
    _keep_best(row, num_kept, least=ranked[num_kept - 1])


def _keep_best(row: Scores, num_kept: int, least: np.float32) -> None:
    """Cuts all but the best `num_kept` of row [N], in place; `least` is the score of the last one kept."""
    row[row < least] = IMPOSSIBLE
    equals = np.flatnonzero(row == least)
    num_surplus = np.count_nonzero(row >= least) - num_kept
    row[equals[len(equals) - num_surplus :]] = IMPOSSIBLE
