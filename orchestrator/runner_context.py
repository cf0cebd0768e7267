"""What all sessions of one orchestrator share. Plain data."""

import dataclasses
from collections.abc import Callable, Mapping

from orchestrator.cluster import Cluster
from orchestrator.routing import Routing
from orchestrator.session_store import SessionStore
from specdec.telemetry import OrchestratorMetrics


@dataclasses.dataclass(frozen=True)
class RunnerContext:
    cluster: Cluster
    store: SessionStore
    store_is_reachable: Callable[[], bool]
    strict: bool
    metrics: OrchestratorMetrics
    num_own_sessions: Callable[[], Mapping[str, int]] = dict
    """By verifier."""
    num_own_attachments: Callable[[], Mapping[str, int]] = dict
    """By drafter, those that are being made too."""
    routing: Routing = dataclasses.field(default_factory=Routing)
    failover_timeout_s: float = 30.0
    """A session that lost its verifier looks for another for so long."""
