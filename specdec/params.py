"""What a request asks for, checked once. Pure: no torch, no protobuf. Fields are named as in common.proto."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from specdec.errors import EmptyPromptError, InvalidParameterError
from specdec.ids import SessionId

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LISTED_TOKENS = 1024
MAX_DRAFT_NODES = 512
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_SAMPLES = 16
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}(\.(0|[1-9][0-9]?))?")
_TENANT = re.compile(r"[A-Za-z0-9_-]{0,64}")


class AcceptanceRule(Enum):
    """Values are the names of specdec.v1.AcceptanceRule without the prefix."""

    GREEDY = "GREEDY"
    COUPLED = "COUPLED"
    ONE_HOT = "ONE_HOT"
    REJECTION = "REJECTION"


class FinishReason(Enum):
    """Values are the names of specdec.v1.FinishReason without the prefix."""

    STOP_TOKEN = "STOP_TOKEN"  # noqa: S105 - a reason, not a secret
    STOP_STRING = "STOP_STRING"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"


class NextTokenKind(Enum):
    """Values are the names of specdec.v1.NextTokenKind without the prefix; no next token is None."""

    RECOVERED = "RECOVERED"
    BONUS = "BONUS"
    PLAIN = "PLAIN"


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidParameterError(f"{field}: {message}", field=field)


def _require_range(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    bracket = "(" if low_open else "["
    _require(inside, field, f"must be in {bracket}{low:g}, {high:g}]")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the target's logits. Defaults change nothing.

    Raises InvalidParameterError from `validated` for values out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    acceptance_rule: AcceptanceRule | None = None

    @property
    def rule(self) -> AcceptanceRule:
        """The rule in force: greedy at temperature 0, coupled by default otherwise."""
        if self.acceptance_rule is not None:
            return self.acceptance_rule
        return AcceptanceRule.GREEDY if self.temperature == 0 else AcceptanceRule.COUPLED

    def validated(self, vocabulary_size: int | None = None) -> "SamplingParams":
        """Returns self; raises InvalidParameterError naming the field. Ids are checked if the vocabulary is known."""
        _require_range("temperature", self.temperature, 0.0, 100.0)
        _require(0 <= self.top_k < 2**31, "top_k", "must be at least 0")
        _require_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require(0 <= self.min_tokens < 2**31, "min_tokens", "must be at least 0")
        if self.seed is not None:
            _require(0 <= self.seed <= MAX_SEED, "seed", "must be in [0, 2^63)")
        greedy = self.acceptance_rule is AcceptanceRule.GREEDY
        _require(
            self.acceptance_rule is None or greedy == (self.temperature == 0),
            "acceptance_rule",
            "GREEDY goes with temperature 0, the other rules with a temperature above 0",
        )
        for value in self.logit_bias.values():
            _require_range("logit_bias", value, -100.0, 100.0)
        for field, ids in (
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids),
            ("banned_token_ids", self.banned_token_ids),
        ):
            _require(len(ids) <= MAX_LISTED_TOKENS, field, f"at most {MAX_LISTED_TOKENS} token ids")
            limit = 2**31 if vocabulary_size is None else vocabulary_size
            _require(all(0 <= token_id < limit for token_id in ids), field, "token id outside the vocabulary")
        if self.allowed_token_ids:
            left = set(self.allowed_token_ids) - set(self.banned_token_ids)
            _require(bool(left), "banned_token_ids", "every allowed token is banned")
        return self


@dataclasses.dataclass(frozen=True)
class StopCriteria:
    """When an output ends, besides the model's own end-of-sequence token."""

    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_end_of_sequence: bool = False

    def validated(self) -> "StopCriteria":
        """Returns self; raises InvalidParameterError naming the field."""
        if self.max_new_tokens is not None:
            _require(1 <= self.max_new_tokens < 2**31, "max_new_tokens", "must be at least 1")
        _require(len(self.stop_strings) <= MAX_STOP_STRINGS, "stop_strings", f"at most {MAX_STOP_STRINGS}")
        _require(
            all(0 < len(stop) <= MAX_STOP_STRING_CHARS for stop in self.stop_strings),
            "stop_strings",
            f"each of 1 to {MAX_STOP_STRING_CHARS} characters",
        )
        _require(len(self.stop_token_ids) <= MAX_LISTED_TOKENS, "stop_token_ids", f"at most {MAX_LISTED_TOKENS}")
        return self


@dataclasses.dataclass(frozen=True)
class SpeculationOptions:
    """What a request wants of speculation. It changes speed, never a token."""

    disabled: bool = False
    max_draft_tokens: int | None = None
    max_draft_wait_s: float | None = None

    def validated(self) -> "SpeculationOptions":
        """Returns self; raises InvalidParameterError naming the field."""
        if self.max_draft_tokens is not None:
            _require(0 <= self.max_draft_tokens <= MAX_DRAFT_NODES, "max_draft_tokens", f"in [0, {MAX_DRAFT_NODES}]")
        if self.max_draft_wait_s is not None:
            _require_range("max_draft_wait", self.max_draft_wait_s, 0.0, 60.0)
        return self


@dataclasses.dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...] | tuple[int, ...]
"""Plain text, a conversation, or token ids. An empty tuple is an empty prompt."""


@dataclasses.dataclass(frozen=True)
class GenerationSpec:
    """Everything that decides an output."""

    prompt: Prompt
    model: str = ""
    sampling: SamplingParams = SamplingParams()
    stop: StopCriteria = StopCriteria()
    speculation: SpeculationOptions = SpeculationOptions()
    num_logprobs: int | None = None
    num_samples: int = 1
    num_prompt_logprobs: int | None = None
    same_numerics_only: bool = False

    def validated(self) -> "GenerationSpec":
        """Returns self.

        Raises:
            EmptyPromptError: no text, no turns or no tokens.
            InvalidParameterError: a value out of range.
        """
        if len(self.prompt) == 0:
            raise EmptyPromptError("the prompt is empty")
        self.sampling.validated()
        self.stop.validated()
        self.speculation.validated()
        if self.num_logprobs is not None:
            _require_range("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            _require_range("num_prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS)
        _require_range("num_samples", self.num_samples, 1, MAX_SAMPLES)
        return self

    def of_sample(self, sample_index: int) -> "GenerationSpec":
        """What one of several samples asks for: the prompt's log-probabilities are the first one's alone."""
        num_prompt_logprobs = self.num_prompt_logprobs if sample_index == 0 else None
        return dataclasses.replace(self, num_samples=1, num_prompt_logprobs=num_prompt_logprobs)


def validate_request_id(session_id: str) -> str:
    """Returns a session id that a client chose; raises InvalidParameterError unless it is 1 to 64 of [A-Za-z0-9_-]."""
    _require(_REQUEST_ID.fullmatch(session_id) is not None, "session_id", "1 to 64 of [A-Za-z0-9_-]")
    return session_id


def validate_session_id(session_id: str) -> str:
    """Returns it; raises InvalidParameterError unless it is a client's session id or one of its samples, `id.index`."""
    _require(_SESSION_ID.fullmatch(session_id) is not None, "session_id", "1 to 64 of [A-Za-z0-9_-], or id.index")
    return session_id


def sample_session_id(session_id: SessionId, sample_index: int) -> SessionId:
    """The session of one of several samples. No client can choose such an id: `validate_request_id`."""
    return SessionId(f"{session_id}.{sample_index}")


def validate_tenant(tenant: str) -> str:
    """Returns it; raises InvalidParameterError unless it is empty or 1 to 64 of [A-Za-z0-9_-]."""
    _require(_TENANT.fullmatch(tenant) is not None, "tenant", "1 to 64 of [A-Za-z0-9_-]")
    return tenant


def is_chat(prompt: Prompt) -> bool:
    """Whether a non-empty prompt is a conversation."""
    return not isinstance(prompt, str) and isinstance(prompt[0], ChatMessage)


def prompt_token_ids(prompt: Prompt) -> Sequence[int] | None:
    """The token ids of a tokenised prompt, None for text and conversations."""
    if isinstance(prompt, str) or is_chat(prompt):
        return None
    return [token for token in prompt if isinstance(token, int)]
