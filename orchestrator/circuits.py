"""The circuits of all servers. Knows which are to be left alone now, and no session. Pure: times are arguments.

A drafter has one for each verifier that it was sent to: where the two cannot reach each other, it serves others still.
"""

from orchestrator.breaker import Breaker, Outcome, apply
from specdec.messages.cluster import CircuitState

_WORST_FIRST = (CircuitState.OPEN, CircuitState.HALF_OPEN, CircuitState.CLOSED)


class Circuits:
    """At most one for each pair of servers that are known: `forget` those that are gone."""

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def note(self, endpoint: str, towards: str, outcome: Outcome, now: float, *, rest_s: float = 0.0) -> bool:
        """Takes what came of an attempt, at a drafter towards that verifier. True where others may now be let through
        that were not, or the other way round."""
        key = (endpoint, towards)
        before = self._breakers.get(key, Breaker())
        after = apply(before, outcome, now, rest_s=rest_s)
        if after == Breaker():
            self._breakers.pop(key, None)
        else:
            self._breakers[key] = after
        return before.lets_through(now) != after.lets_through(now)

    def state(self, endpoint: str, now: float) -> CircuitState:
        """The worst of the server's circuits."""
        states = {breaker.state(now) for (name, _), breaker in self._breakers.items() if name == endpoint}
        return next((state for state in _WORST_FIRST if state in states), CircuitState.CLOSED)

    def resting(self, towards: str, now: float) -> dict[str, float]:
        """Servers that are to be left alone, and for how many seconds at most."""
        waits = {name: breaker.wait_s(now) for (name, other), breaker in self._breakers.items() if other == towards}
        return {name: wait_s for name, wait_s in waits.items() if wait_s > 0}

    def forget(self, endpoint: str) -> None:
        """It starts anew, or is gone: what was held against it, or against others towards it, no longer counts."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if endpoint not in key}
