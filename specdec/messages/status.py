"""What a server says of itself."""

import dataclasses


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
    max_waiting_sessions: int | None = None
    """Sessions that may wait, None where the server does not say."""
    queue_wait_s: float = 0.0
    """How long a session that came now would wait for its turn."""


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
