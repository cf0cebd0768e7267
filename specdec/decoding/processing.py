"""From logits to scores: every sampling parameter, at every position, with the history that is that position's own.

The order is the contract's: allowed and banned tokens, min_tokens, logit bias; repetition, presence and frequency
penalties; temperature; min-p; top-k; top-p. Scores are log-probabilities but for one constant per row, and -inf where a
token is impossible. The steps are those of `rows.scores` and `rows.truncation`. Knows no rule: what the scores are for
is `acceptance`'s business.

Shapes: R rows, V logit rows of the model (padding included), N vocabulary_size.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specdec.decoding.draft import DraftTokens
from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.decoding.round_input import RoundInput
from specdec.decoding.rows.batch import edits, make_scores, reshapes
from specdec.errors import InvalidParameterError
from specdec.params import SamplingParams

_NO_DRAFT, _NO_NOISE = DraftTokens(), Noise(0)


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

    Where no parameter is on they are a view of the logits, wherever those are; else a copy on the CPU.

    Args:
        logits: float32, finite.
        params: validated for `vocabulary_size`, and left a token by `require_possible_token`.
        prompt_token_ids: history for the repetition penalty alone.
        output_token_ids_per_row: for each row all output tokens before it, the draft tokens on its path included.
        suppressed_token_ids: tokens that end an output; impossible in rows with fewer than min_tokens before them.
        vocabulary_size: ids from here on are padding and have no scores at all.
    """
    histories = [TokenHistory(prompt_token_ids, output) for output in output_token_ids_per_row]
    return process_with_histories(logits, params, histories, suppressed_token_ids, vocabulary_size)


def process_with_histories(
    logits: Tensor,
    params: SamplingParams,
    histories: Sequence[TokenHistory],
    suppressed_token_ids: Collection[int],
    vocabulary_size: int,
) -> Tensor:
    """`process_logits` with the history of each row counted already."""
    is_early = any(output.num_output_tokens < params.min_tokens for output in histories) and suppressed_token_ids
    if not (edits(params, bool(is_early)) or reshapes(params, vocabulary_size)):
        return logits[:, :vocabulary_size]
    rounds = [
        RoundInput(params, _NO_NOISE, 0, _NO_DRAFT, history, tuple(suppressed_token_ids)) for history in histories
    ]
    return make_scores(rounds, logits.cpu(), vocabulary_size)


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
