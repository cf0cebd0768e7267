"""Speculative decoding in one process: the whole algorithm on one page, as the truth that the servers are held to.

Knows two callables and no cache: every prefix is computed anew. Slow on purpose.

Shapes: K draft tokens, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.acceptance import accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.decoding.processing import process_logits
from specdec.params import SamplingParams

Target = Callable[[Sequence[Sequence[int]]], Tensor]
"""Logits [R, V] float32 that follow each of R token prefixes: what a verifier computes in one forward pass."""

Proposer = Callable[[Sequence[int]], DraftTokens]
"""A guess at what follows the committed tokens. No tokens at all is a guess too."""


@dataclass(frozen=True)
class ReferenceOutput:
    token_ids: list[int]
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int


def decode_speculatively(
    target: Target,
    propose: Proposer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    noise: Noise,
    *,
    max_new_tokens: int,
    end_token_ids: Collection[int],
    vocabulary_size: int,
) -> ReferenceOutput:
    """The output is distributed as the target alone under `params`, whatever `propose` does."""
    committed = list(prompt_token_ids)
    num_rounds = num_draft_tokens = num_accepted_tokens = 0
    while True:
        draft = propose(committed)
        prefixes = [committed, *(committed + draft.path_to(node) for node in range(len(draft.token_ids)))]  # 1 + K
        scores = process_logits(
            target(prefixes),
            params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids_per_row=[prefix[len(prompt_token_ids) :] for prefix in prefixes],
            suppressed_token_ids=end_token_ids,
            vocabulary_size=vocabulary_size,
        )  # [1 + K, V]
        acceptance = accept(params.rule, scores, draft, noise, base_position=len(committed))
        accepted = [draft.token_ids[node] for node in acceptance.accepted_node_indices]

        num_rounds += 1
        num_draft_tokens += len(draft.token_ids)
        for index, token_id in enumerate([*accepted, acceptance.next_token_id]):
            committed.append(token_id)
            num_accepted_tokens += index < len(accepted)
            output = committed[len(prompt_token_ids) :]
            if token_id in end_token_ids or len(output) == max_new_tokens:
                return ReferenceOutput(output, num_rounds, num_draft_tokens, num_accepted_tokens)
