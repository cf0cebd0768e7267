"""Frames of Generate and Resume, and the orchestrator's word to a drafter."""

import dataclasses
from collections.abc import Sequence

from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages.logprobs import PositionLogprobs, PromptLogprobs
from specdec.messages.statistics import RoundStatistics, SpeculativeStatistics, Usage
from specdec.params import AcceptanceRule, FinishReason, SamplingParams, SpeculationOptions


@dataclasses.dataclass(frozen=True)
class Started:
    session_id: SessionId
    model: str
    seed: int
    acceptance_rule: AcceptanceRule
    num_prompt_tokens: int
    numerics_fingerprint: str
    sample_session_ids: Sequence[SessionId] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    text: str
    token_ids: Sequence[int]
    position: int
    round: RoundStatistics
    token_texts: Sequence[str] = ()
    logprobs: Sequence[PositionLogprobs] = ()
    sample_index: int = 0


@dataclasses.dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: Usage
    speculative: SpeculativeStatistics
    text: str
    sample_index: int = 0
    num_failovers: int = 0
    numerics_changed: bool = False


GenerationEvent = Started | PromptLogprobs | Delta | Finished
"""A frame of Generate."""


@dataclasses.dataclass(frozen=True)
class AttachSession:
    """Tells a drafter to join a session. `sampling` never carries the seed."""

    session_id: SessionId
    epoch: Epoch
    verifier_endpoint: str
    attachment_id: AttachmentId
    attach_key: bytes
    sampling: SamplingParams
    speculation: SpeculationOptions
    known_token_ids: Sequence[int]
    prompt_length: int
    acceptance_rule: AcceptanceRule
    sample_index: int = 0
