"""Everything but the logits that decides a round."""

from collections.abc import Collection
from dataclasses import dataclass

from specdec.decoding.draft import DraftTokens
from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.params import SamplingParams


@dataclass(frozen=True)
class RoundInput:
    """One session's round: which tokens stand at `base_position` and after.

    `history` ends before `base_position`. `suppressed_token_ids` end an output, and are impossible before min_tokens.
    `num_logprobs` asks for log-probabilities: None for none, 0 for those of the decided tokens, n for those of the n
    most likely tokens too.
    """

    params: SamplingParams
    noise: Noise
    base_position: int
    draft: DraftTokens
    history: TokenHistory
    suppressed_token_ids: Collection[int] = ()
    num_logprobs: int | None = None
