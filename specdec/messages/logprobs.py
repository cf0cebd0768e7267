"""Log-probabilities of tokens, natural, of the target before sampling parameters."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclasses.dataclass(frozen=True)
class PositionLogprobs:
    """Of the token that stands at a position, and of the most likely tokens there, most likely first."""

    chosen: TokenLogprob
    alternatives: Sequence[TokenLogprob] = ()


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    start_position: int
    logprobs: Sequence[PositionLogprobs]
