"""One server as the orchestrator sees it. Plain data."""

import dataclasses

from specdec import PROTOCOL_VERSION
from specdec.messages import ServerStatus
from specdec.messages.cluster import CircuitState, Role


@dataclasses.dataclass(frozen=True)
class EndpointView:
    """One server at the last look. `status` is the last one that it gave, kept while it does not answer."""

    endpoint: str
    role: Role
    healthy: bool = False
    drained: bool = False
    status: ServerStatus | None = None
    round_trip_time_s: float | None = None
    incarnation: int = 0
    """How often it became healthy: what was held against it before no longer counts."""
    circuit: CircuitState = CircuitState.CLOSED
    """Whether it is tried at all after its failures, the worst towards any verifier (see breaker.py)."""
    last_error: str = ""
    """The reason of the last failure that was held against this incarnation, empty without one."""

    @property
    def takes_sessions(self) -> bool:
        """Whether it serves, and speaks as this process does: no newer or older protocol is guessed at."""
        status = self.status
        if not self.healthy or self.drained or status is None:
            return False
        return status.protocol_version == PROTOCOL_VERSION and not status.draining
