"""The Verify stream: what a drafter and a verifier say to each other, and why either says no."""

import dataclasses
from collections.abc import Sequence
from enum import Enum

from specdec.ids import AttachmentId, DraftSequence, Epoch, Round, SessionId
from specdec.params import FinishReason


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

    @property
    def is_late(self) -> bool:
        """The verifier had committed other tokens, or all of the draft's, before it came."""
        return self in (DropReason.HEAD_DIFFERS, DropReason.TOO_LATE)


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
