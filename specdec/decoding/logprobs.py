"""Log-probabilities under the target itself, before any sampling parameter: what a request is told, never what decides.

A row's numbers depend on that row alone, so that they are the same bits with and without a draft, and for a prompt.

Shapes: R rows, V logit rows of the model, N vocabulary_size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.messages import PositionLogprobs, TokenLogprob


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_alternatives: int, vocabulary_size: int
) -> list[PositionLogprobs]:
    """Natural logarithms of the target's probabilities, of R tokens and of the most likely ones beside them.

    Args:
        logits: [R, V] float32, finite.
        token_ids: [R], each below `vocabulary_size`: row i's logits precede token i.
        num_alternatives: most likely tokens to list in each row, the lowest id first among equals; 0 for none.
        vocabulary_size: ids from here on are padding: they have no probability and are never listed.
    """
    positions = []
    for row, token_id in zip(logits[:, :vocabulary_size].cpu().double(), token_ids, strict=True):
        logprobs = torch.log_softmax(row, dim=-1)
        best = torch.sort(-row, stable=True).indices[:num_alternatives].tolist()
        positions.append(
            PositionLogprobs(
                TokenLogprob(token_id, float(logprobs[token_id])),
                tuple(TokenLogprob(other, float(logprobs[other])) for other in best),
            )
        )
    return positions
