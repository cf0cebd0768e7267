"""What rounds and sessions cost and brought."""

import dataclasses

from specdec.params import NextTokenKind


@dataclasses.dataclass(frozen=True)
class RoundStatistics:
    num_draft_tokens: int
    num_accepted_tokens: int
    next_token_kind: NextTokenKind | None
    total_time_s: float
    verify_forward_time_s: float
    queue_time_s: float
    draft_time_s: float | None = None
    round_trip_time_s: float | None = None
    fallback_decode: bool = False


@dataclasses.dataclass(frozen=True)
class SpeculativeStatistics:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    num_rounds: int = 0
    num_stale_drafts: int = 0
    num_refused_drafts: int = 0
    num_fallback_decodes: int = 0
    disabled_reason: str = ""


@dataclasses.dataclass(frozen=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int = 0
