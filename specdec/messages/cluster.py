"""The system as one orchestrator sees it: its servers and its sessions. What AdminService tells people and tools."""

import dataclasses
from enum import Enum

from specdec.ids import Epoch, SessionId
from specdec.messages.status import ServerStatus


class Role(Enum):
    """Values are the names of specdec.v1.Role without the prefix."""

    VERIFIER = "VERIFIER"
    DRAFTER = "DRAFTER"
    ORCHESTRATOR = "ORCHESTRATOR"


class CircuitState(Enum):
    """Whether a server that failed is tried. Values are the names of specdec.v1.CircuitState without the prefix."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


@dataclasses.dataclass(frozen=True)
class EndpointStatus:
    """One server. `acceptance_rate` (None: no drafts) and `tokens_per_s` are of this orchestrator's sessions there."""

    endpoint: str
    role: Role
    healthy: bool
    drained: bool
    status: ServerStatus | None = None
    round_trip_time_s: float | None = None
    num_own_sessions: int = 0
    acceptance_rate: float | None = None
    tokens_per_s: float = 0.0
    circuit: CircuitState = CircuitState.CLOSED
    last_error: str = ""


@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    """At one moment, the orchestrator first. `drains_shared`: other orchestrators see drains that are ordered here."""

    endpoints: tuple[EndpointStatus, ...]
    taken_at_unix_s: float
    store_healthy: bool
    drains_shared: bool


@dataclasses.dataclass(frozen=True)
class DrainOrder:
    """What became of an order to drain a server, or to use it again.

    Attributes:
        shared: other orchestrators see it, and it outlasts this one's process.
        num_sessions: of this orchestrator that the server had when the order came.
    """

    shared: bool
    num_sessions: int


class SessionState(Enum):
    """Values are the names of specdec.v1.SessionState without the prefix."""

    CLAIMED = "CLAIMED"
    OPENED = "OPENED"
    STREAMING = "STREAMING"
    ENDING = "ENDING"


@dataclasses.dataclass(frozen=True)
class SessionSummary:
    """One session, without a word of its prompt. `acceptance_rate` None: no drafts."""

    session_id: SessionId
    epoch: Epoch
    verifier_endpoint: str
    drafter_endpoint: str
    num_prompt_tokens: int
    num_output_tokens: int
    opened_at_unix_s: float
    age_s: float
    tenant: str
    state: SessionState
    num_failovers: int
    acceptance_rate: float | None
    tokens_per_s: float
