"""The typed messages that pass between roles, free of protobuf. `specdec.wire.convert` alone maps them to the wire.

Names and fields are those of specdec/v1/verifier.proto, where each is explained. Durations are seconds.
"""

import dataclasses
from collections.abc import Sequence
from enum import Enum

from specdec.ids import AttachmentId, DraftSequence, Epoch, Round, SessionId
from specdec.params import (
    AcceptanceRule,
    FinishReason,
    GenerationSpec,
    NextTokenKind,
    SamplingParams,
    SpeculationOptions,
)


class DropReason(Enum):
    STALE_EPOCH = "STALE_EPOCH"
    STALE_ATTACHMENT = "STALE_ATTACHMENT"
    DUPLICATE = "DUPLICATE"
    HEAD_DIFFERS = "HEAD_DIFFERS"
    TOO_LATE = "TOO_LATE"
    TOO_EARLY = "TOO_EARLY"
    SUPERSEDED = "SUPERSEDED"
    DETACHED = "DETACHED"
    SESSION_ENDED = "SESSION_ENDED"


class RefusalReason(Enum):
    TOKEN_OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"  # noqa: S105 - a reason, not a secret
    MALFORMED_TREE = "MALFORMED_TREE"
    INVALID_PROBABILITY = "INVALID_PROBABILITY"
    UNNORMALISED = "UNNORMALISED"
    MISSING_PROBABILITY = "MISSING_PROBABILITY"
    TOO_MANY_NODES = "TOO_MANY_NODES"
    UNKNOWN_ATTACHMENT = "UNKNOWN_ATTACHMENT"
    MALFORMED_DRAFT = "MALFORMED_DRAFT"
    NOT_ALLOWED_BY_RULE = "NOT_ALLOWED_BY_RULE"


class AttachRefusal(Enum):
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    STALE_EPOCH = "STALE_EPOCH"
    BAD_KEY = "BAD_KEY"
    STALE_ATTACHMENT = "STALE_ATTACHMENT"
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    VOCABULARY_MISMATCH = "VOCABULARY_MISMATCH"
    CONTEXT_TOO_SHORT = "CONTEXT_TOO_SHORT"
    PROTOCOL_VERSION = "PROTOCOL_VERSION"
    NO_HIDDEN_STATES = "NO_HIDDEN_STATES"
    BAD_KNOWN_LENGTH = "BAD_KNOWN_LENGTH"
    SPECULATION_DISABLED = "SPECULATION_DISABLED"
    TOO_MANY_ATTACHMENTS = "TOO_MANY_ATTACHMENTS"


class DetachReason(Enum):
    REPLACED = "REPLACED"
    SESSION_ENDED = "SESSION_ENDED"
    REQUESTED = "REQUESTED"
    STREAM_BROKEN = "STREAM_BROKEN"
    MISBEHAVED = "MISBEHAVED"
    SLOW_READER = "SLOW_READER"
    DRAINING = "DRAINING"


class AttachmentState(Enum):
    ATTACHED = "ATTACHED"
    REFUSED = "REFUSED"
    DETACHED = "DETACHED"


# --- Drafter to verifier ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SparseDistribution:
    """Probabilities of a few token ids, the rest 0. No ids with probabilities for all: the whole vocabulary."""

    token_ids: Sequence[int]
    probs: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Attach:
    epoch: Epoch
    attach_key: bytes
    known_length: int
    known_digest: bytes
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_limit: int
    protocol_version: int
    wants_hidden_states: bool = False


@dataclasses.dataclass(frozen=True)
class Draft:
    epoch: Epoch
    draft_sequence: DraftSequence
    start_position: int
    draft_token_ids: Sequence[int]
    parent_indices: Sequence[int] = ()
    draft_probs: Sequence[SparseDistribution] = ()
    draft_time_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Detach:
    pass


# --- Verifier to drafter ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attached:
    committed_token_ids: Sequence[int]
    start_position: int
    seed: int | None
    draft_budget: int


@dataclasses.dataclass(frozen=True)
class AttachRefused:
    reason: AttachRefusal
    message: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    draft_sequence: DraftSequence
    round: Round
    base_position: int
    num_accepted_tokens: int
    committed_token_ids: Sequence[int]
    committed_length: int
    draft_budget: int
    accepted_node_indices: Sequence[int] = ()
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class Advance:
    round: Round
    base_position: int
    committed_token_ids: Sequence[int]
    committed_length: int
    draft_budget: int
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class Dropped:
    draft_sequence: DraftSequence
    reason: DropReason
    committed_length: int
    missing_token_ids: Sequence[int]
    draft_budget: int


@dataclasses.dataclass(frozen=True)
class Refused:
    draft_sequence: DraftSequence
    reason: RefusalReason
    message: str
    committed_length: int
    missing_token_ids: Sequence[int]
    draft_budget: int


@dataclasses.dataclass(frozen=True)
class BudgetUpdate:
    draft_budget: int


@dataclasses.dataclass(frozen=True)
class Detached:
    reason: DetachReason


DrafterMessage = Attach | Draft | Detach
"""What a drafter says, beside (SessionId, AttachmentId)."""

VerifierMessage = Attached | AttachRefused | Verdict | Advance | Dropped | Refused | BudgetUpdate | Detached
"""What a verifier says to a drafter, beside (SessionId, AttachmentId)."""


@dataclasses.dataclass(frozen=True)
class Addressed:
    """A message with the attachment that it speaks of: one Verify stream carries many."""

    session_id: SessionId
    attachment_id: AttachmentId
    message: DrafterMessage | VerifierMessage


# --- Orchestrator and verifier ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OpenSession:
    session_id: SessionId
    epoch: Epoch
    owner_nonce: bytes
    spec: GenerationSpec
    committed_token_ids: Sequence[int] = ()
    prompt_length: int = 0
    tenant: str = ""
    sample_index: int = 0


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


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What decides the bits of a model's logits; equal fingerprints promise equal bits."""

    fingerprint: str
    weights_digest: str
    weights_dtype: str
    compute_dtype: str
    device: str
    linear_kernel: str
    attention_kernel: str
    libraries: str


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    passed: bool
    max_rows: int
    safe_row_counts: tuple[int, ...]
    num_comparisons: int
    detail: str
    elapsed_s: float


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


@dataclasses.dataclass(frozen=True)
class AttachmentChange:
    attachment_id: AttachmentId
    state: AttachmentState
    refusal: AttachRefusal | None = None
    detach_reason: DetachReason | None = None


SessionEvent = Opened | PromptLogprobs | Commit | Draining | SessionFinished | Fenced | AttachmentChange
"""What a verifier says to the orchestrator that owns a session."""


# --- Status ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    name: str
    vocabulary_size: int
    context_limit: int
    tokenizer_fingerprint: str
    numerics: Numerics | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    num_active_sessions: int = 0
    num_waiting_sessions: int = 0
    kv_used_bytes: int = 0
    kv_budget_bytes: int = 0
    num_attachments: int = 0


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    serving: bool
    draining: bool
    version: str
    protocol_version: int
    model: ModelInfo | None = None
    self_check: SelfCheck | None = None
    load: Load = Load()
    proposer: str = ""


# --- Client and orchestrator -----------------------------------------------------------------------------------------


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


GenerationEvent = Started | PromptLogprobs | Delta | Finished
"""A frame of Generate."""


# --- Orchestrator and drafter ----------------------------------------------------------------------------------------


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
