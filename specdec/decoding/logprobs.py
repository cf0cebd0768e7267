"""Log-probabilities under the target itself, before any sampling parameter: what a request is told, never what decides.

A row's numbers depend on that row alone, so that they are the same bits with and without a draft, and for a prompt.

Shapes: R rows, V logit rows of the model, N vocabulary_size, A alternatives.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec import openmp
from specdec.decoding.rows.arithmetic import BLOCK
from specdec.decoding.rows.likely import LIKELY, find_logprobs
from specdec.messages import PositionLogprobs, TokenLogprob


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_alternatives: int,
    vocabulary_size: int,
    rows: Sequence[int] | None = None,
) -> list[PositionLogprobs]:
    """Natural logarithms of the target's probabilities, of R tokens and of the most likely ones beside them.

    Args:
        logits: [R, V] float32, finite; any number of rows where `rows` is given. On any device.
        token_ids: [R] the token that follows each row's position. Padding has probability 0.
        num_alternatives: most likely tokens to list in each row, the lowest id first among equals; 0 for none.
        vocabulary_size: ids from here on are padding: they have no probability and are never listed.
        rows: [R] the rows of the logits that are meant; all, in order, where not given.
    """
    rows = range(len(logits)) if rows is None else rows
    if len(rows) != len(token_ids):
        raise ValueError(f"{len(rows)} rows of logits for {len(token_ids)} tokens")
    if not logits.is_cpu:
        logits, rows = logits[list(rows)].cpu(), range(len(rows))
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        logits = logits.float().contiguous()
    num_asked, num_alternatives = len(rows), min(num_alternatives, vocabulary_size)
    logprobs = np.empty(num_asked)
    alternative_ids = np.empty((num_asked, num_alternatives), dtype=np.int64)
    alternative_logprobs = np.empty((num_asked, num_alternatives))
    own_rows, own_ids = np.array(rows, dtype=np.int64), np.array(token_ids, dtype=np.int64)
    maxima = np.empty((torch.get_num_threads(), -(-vocabulary_size // BLOCK)), dtype=np.float32)
    record = (
        vocabulary_size,
        len(logits),
        logits.stride(0),
        logits.data_ptr(),
        num_asked,
        own_rows.ctypes.data,
        own_ids.ctypes.data,
        logprobs.ctypes.data,
        num_alternatives,
        alternative_ids.ctypes.data,
        alternative_logprobs.ctypes.data,
        len(maxima),
        maxima.ctypes.data,
    )
    openmp.run(find_logprobs, np.array([record], dtype=LIKELY), alone=num_asked == 1)
    return [
        PositionLogprobs(TokenLogprob(token_id, logprob), tuple(map(TokenLogprob, other_ids, other_logprobs)))
        for token_id, logprob, other_ids, other_logprobs in zip(
            token_ids, logprobs.tolist(), alternative_ids.tolist(), alternative_logprobs.tolist(), strict=True
        )
    ]
