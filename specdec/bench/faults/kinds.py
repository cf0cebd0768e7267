"""Every kind of fault that a campaign injects: the rows of the table of lost roles, told one by one. Pure: a table.

A fault strikes a role (its process) or a link between two roles (the bytes of one direction or of both). Kinds that
share a lane are injected one after the other, so that of no role more than one is away at a time; lanes run beside one
another.
"""

import dataclasses
from enum import Enum


class Party(Enum):
    """Who can be struck, or is at one end of a link that is."""

    CLIENT = "client"
    ORCHESTRATOR = "orchestrator"
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    STORE = "store"


class Act(Enum):
    """What is done. The first six are done to a process, the others to a link."""

    KILL = "kill"
    """SIGKILL, and a new process a moment later; the store comes back with all its data."""
    KILL_LOSING_TAIL = "kill_losing_tail"
    """The same, and the store's last second is gone."""
    KILL_LOSING_ALL = "kill_losing_all"
    """The same, and the store comes back empty."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT some seconds later: a process that others gave up on goes on as if nothing had been."""
    DRAIN = "drain"
    """SIGTERM, and a new process when it has ended: a rolling upgrade."""
    HALF_OPEN = "half_open"
    """All connections of a server stay open, and nothing comes through any more; new ones are as usual."""
    RESET = "reset"
    """The connections of a link are reset once."""
    HOLD_TO_SERVER = "hold_to_server"
    """Nothing reaches the server for some seconds; then what was sent meanwhile arrives, late."""
    HOLD_TO_CLIENT = "hold_to_client"
    """The same in the other direction."""
    HOLD_BOTH = "hold_both"
    """The same in both."""


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """One row.

    Attributes:
        target: who is struck; of a link, who listens.
        source: of a link, who connects; None where a process is struck.
        lane: who else waits while this fault lasts.
        weight: how often it comes, beside the others.
    """

    act: Act
    target: Party
    source: Party | None
    lane: Party
    weight: int = 1

    @property
    def name(self) -> str:
        """As in `verifier:kill` and `drafter-verifier:hold_both`."""
        where = self.target.value if self.source is None else f"{self.source.value}-{self.target.value}"
        return f"{where}:{self.act.value}"


_PROCESS_ACTS = {
    Party.VERIFIER: {Act.KILL: 3, Act.STOP: 3, Act.DRAIN: 2, Act.HALF_OPEN: 2},
    Party.DRAFTER: {Act.KILL: 2, Act.STOP: 2, Act.DRAIN: 2},
    Party.ORCHESTRATOR: {Act.KILL: 3, Act.STOP: 2, Act.DRAIN: 2},
    Party.STORE: {Act.KILL: 2, Act.KILL_LOSING_TAIL: 2, Act.KILL_LOSING_ALL: 2, Act.STOP: 2},
}
_LINKS = {
    (Party.CLIENT, Party.ORCHESTRATOR): Party.ORCHESTRATOR,
    (Party.ORCHESTRATOR, Party.VERIFIER): Party.VERIFIER,
    (Party.ORCHESTRATOR, Party.DRAFTER): Party.DRAFTER,
    (Party.DRAFTER, Party.VERIFIER): Party.DRAFTER,
    (Party.ORCHESTRATOR, Party.STORE): Party.STORE,
}
"""(who connects, who listens): whose lane."""
_LINK_ACTS = (Act.RESET, Act.HOLD_TO_SERVER, Act.HOLD_TO_CLIENT, Act.HOLD_BOTH)

FAULT_KINDS = (
    *(
        FaultKind(act, target, None, lane=target, weight=weight)
        for target, acts in _PROCESS_ACTS.items()
        for act, weight in acts.items()
    ),
    *(FaultKind(act, target, source, lane) for (source, target), lane in _LINKS.items() for act in _LINK_ACTS),
)


def find_kinds(patterns: str) -> tuple[FaultKind, ...]:
    """The kinds whose names begin with one of the patterns, which have commas between them; empty: all.

    Raises:
        ValueError: a pattern fits none.
    """
    wanted = [part.strip() for part in patterns.split(",") if part.strip()]
    for pattern in wanted:
        if not any(kind.name.startswith(pattern) for kind in FAULT_KINDS):
            raise ValueError(f"no kind of fault begins with {pattern!r}; there are {', '.join(_names())}")
    return tuple(kind for kind in FAULT_KINDS if not wanted or any(kind.name.startswith(one) for one in wanted))


def _names() -> list[str]:
    return [kind.name for kind in FAULT_KINDS]
