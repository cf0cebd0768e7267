"""Circuit breaking of servers that fail: one circuit per server, over all sessions. Pure: times are arguments.

    CLOSED --3 failures without a use that went well between--> OPEN --its rest is over--> HALF_OPEN
      ^                                                           ^                          |  |
      +------------------------ANSWERED (the probe's)-------------|--------------------------+  |
                                                                  +-----------FAILED------------+

Half open, one attempt at a time is let through: the probe. What a server refuses for the session's own sake shows that
it answers, and never counts against it. Rests double from trip to trip until a use has gone well to its end; a new
incarnation of the server starts with a new circuit (see cluster.py). Knows no server and no session.
"""

import dataclasses
from enum import Enum

from specdec.errors import (
    DeadlineError,
    DrainingError,
    LoadingError,
    OverloadedError,
    PeerUnavailableError,
    SpecdecError,
)
from specdec.messages.cluster import CircuitState

NUM_FAILURES_TO_OPEN = 3
"""One lost stream is told of once by each of its sessions, and one failure happens to the best."""
MIN_REST_S = 0.25
MAX_REST_S = 15.0
_MAX_TRIPS = 16
"""Counted; rests have been as long as they may be since far fewer."""
PROBE_TIMEOUT_S = 60.0
"""A probe of which nothing was heard for so long is given up: whoever made it may be gone."""


class Outcome(Enum):
    """What came of using a server."""

    TRIED = "TRIED"  # an attempt begins
    ANSWERED = "ANSWERED"  # it answered the attempt, be it with a refusal
    WORKED = "WORKED"  # the use went well to its end
    BUSY = "BUSY"  # it takes nobody for the moment
    FAILED = "FAILED"
    ABANDONED = "ABANDONED"  # the attempt was given up; that says nothing


def outcome_of(error: BaseException) -> Outcome:
    """Of an attempt that ended with this error."""
    match error:
        case OverloadedError() | DrainingError() | LoadingError():
            return Outcome.BUSY
        case PeerUnavailableError() | DeadlineError() | TimeoutError():
            return Outcome.FAILED
        case SpecdecError() if error.status in ("INTERNAL", "UNAVAILABLE"):
            return Outcome.FAILED
        case SpecdecError():
            return Outcome.ANSWERED
        case _:
            return Outcome.ABANDONED


@dataclasses.dataclass(frozen=True)
class Breaker:
    """One endpoint's circuit.

    Attributes:
        num_failures: while closed, since the last use that went well.
        num_trips: how often it opened since then; decides the next rest.
        rests_until: closed where None; else from then on it is half open.
        probe_until: half open, an attempt is under way until then at most.
    """

    num_failures: int = 0
    num_trips: int = 0
    rests_until: float | None = None
    probe_until: float | None = None

    def state(self, now: float) -> CircuitState:
        if self.rests_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self.rests_until else CircuitState.HALF_OPEN

    def lets_through(self, now: float) -> bool:
        """Whether an attempt may be made now."""
        return self.wait_s(now) <= 0

    def wait_s(self, now: float) -> float:
        """Until an attempt may be made, as far as time alone decides it; 0 where it may be made now."""
        if self.rests_until is None:
            return 0.0
        return max(0.0, self.rests_until - now, (self.probe_until or now) - now)


def apply(breaker: Breaker, outcome: Outcome, now: float, *, rest_s: float = 0.0) -> Breaker:
    """The circuit after an outcome. `rest_s`: how long a busy server asked to be left alone, within the bounds."""
    state = breaker.state(now)
    if state is CircuitState.OPEN:
        return breaker  # told by attempts that began before it opened: the probe alone decides
    match outcome:
        case Outcome.TRIED if state is CircuitState.HALF_OPEN:
            return dataclasses.replace(breaker, probe_until=now + PROBE_TIMEOUT_S)
        case Outcome.ABANDONED:
            return dataclasses.replace(breaker, probe_until=None)
        case Outcome.ANSWERED if state is CircuitState.HALF_OPEN:
            # One more failure opens it again, for longer, until something has gone well to its end.
            return Breaker(NUM_FAILURES_TO_OPEN - 1 if breaker.num_trips else 0, breaker.num_trips)
        case Outcome.WORKED if state is CircuitState.CLOSED:
            return Breaker()
        case Outcome.BUSY:
            return dataclasses.replace(
                breaker, rests_until=now + min(max(rest_s, MIN_REST_S), MAX_REST_S), probe_until=None
            )
        case Outcome.FAILED:
            num_failures = breaker.num_failures + 1
            if state is CircuitState.CLOSED and num_failures < NUM_FAILURES_TO_OPEN:
                return dataclasses.replace(breaker, num_failures=num_failures)
            rest_s = min(MIN_REST_S * 2**breaker.num_trips, MAX_REST_S)
            return Breaker(num_failures, min(breaker.num_trips + 1, _MAX_TRIPS), now + rest_s)
    return breaker
