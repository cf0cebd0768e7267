"""OpenSession: what the owner of a session asks of the verifier, and what the verifier tells it."""

import dataclasses
from collections.abc import Sequence
from enum import Enum

from specdec.ids import AttachmentId, Epoch, Round, SessionId
from specdec.messages.drafting import AttachRefusal, DetachReason
from specdec.messages.logprobs import PositionLogprobs, PromptLogprobs
from specdec.messages.statistics import RoundStatistics, SpeculativeStatistics, Usage
from specdec.messages.status import Numerics
from specdec.params import AcceptanceRule, FinishReason, GenerationSpec


@dataclasses.dataclass(frozen=True)
class OpenSession:
    session_id: SessionId
    epoch: Epoch
    owner_nonce: bytes
    spec: GenerationSpec
    committed_token_ids: Sequence[int] = ()
    prompt_length: int = 0
    """Of `committed_token_ids`. 0: they are output alone, and the prompt is the spec's."""
    tenant: str = ""
    sample_index: int = 0
    recorded_token_ids: Sequence[int] = ()
    """Output beyond `committed_token_ids` that the record has and nobody may have seen; `recorded_epoch` decided it."""
    recorded_epoch: Epoch = Epoch(0)


@dataclasses.dataclass(frozen=True)
class Opened:
    attach_secret: bytes
    prompt_token_ids: Sequence[int]
    acceptance_rule: AcceptanceRule
    numerics: Numerics
    model: str
    max_new_tokens: int
    kept_token_ids: Sequence[int] = ()
    kept_epoch: Epoch = Epoch(0)


@dataclasses.dataclass(frozen=True)
class Commit:
    round: Round
    base_position: int
    token_ids: Sequence[int]
    text: str
    statistics: RoundStatistics
    cached_length: int
    token_texts: Sequence[str] = ()
    logprobs: Sequence[PositionLogprobs] = ()


@dataclasses.dataclass(frozen=True)
class Draining:
    grace_s: float


@dataclasses.dataclass(frozen=True)
class SessionFinished:
    reason: FinishReason
    usage: Usage
    speculative: SpeculativeStatistics
    text: str


@dataclasses.dataclass(frozen=True)
class Fenced:
    highest_epoch: Epoch


class AttachmentState(Enum):
    ATTACHED = "ATTACHED"
    REFUSED = "REFUSED"
    DETACHED = "DETACHED"


@dataclasses.dataclass(frozen=True)
class AttachmentChange:
    attachment_id: AttachmentId
    state: AttachmentState
    refusal: AttachRefusal | None = None
    detach_reason: DetachReason | None = None


SessionEvent = Opened | PromptLogprobs | Commit | Draining | SessionFinished | Fenced | AttachmentChange
"""What a verifier says to the orchestrator that owns a session."""
