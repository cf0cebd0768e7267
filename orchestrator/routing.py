"""What one orchestrator has learned for choosing, brought to the router together with the servers' views.

Knows where prompts went, what drafters brought, and what was sent where since a server told of its load. Chooses by
router.py; carries no session and calls nobody.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from orchestrator.affinity import PrefixAffinity
from orchestrator.endpoints import EndpointView
from orchestrator.hedge_delay import HedgeDelay
from orchestrator.measurements import Measurements
from orchestrator.router import SessionNeeds, choose_drafter, choose_verifier, num_reported_sessions
from specdec.ids import SessionId
from specdec.messages import RoundStatistics, ServerStatus
from specdec.params import GenerationSpec

Value = TypeVar("Value")

_MAX_KNOWN = 1024
_MAX_FLEET = 16.0
"""Orchestrators that others' sessions may stand for: more are hardly told apart from few sessions of one's own."""


class Routing:
    """One object per orchestrator."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._affinity = PrefixAffinity()
        self._measurements = Measurements()
        self._hedge_delays: dict[str, HedgeDelay] = {}
        self._sent: dict[str, tuple[ServerStatus | None, int]] = {}
        """By verifier, the status that was known and how many sessions were sent there since."""

    def choose_verifier(
        self,
        verifiers: Sequence[EndpointView],
        session_id: SessionId,
        spec: GenerationSpec,
        tenant: str,
        *,
        excluded: Collection[str] = (),
        num_own_sessions: Mapping[str, int] | None = None,
        numerics_fingerprint: str | None = None,
    ) -> EndpointView:
        """See the router's; the session counts as sent there from now on. Raises as it does."""
        now, own = self._clock(), num_own_sessions or {}
        marks = self._affinity.marks(spec.prompt, tenant, spec.model)
        forward_s = {view.endpoint: self._measurements.forward_s(view.endpoint, now) for view in verifiers}
        fleet = _fleet(verifiers, own)
        needs = SessionNeeds(
            num_prompt_tokens=marks.num_tokens,
            cached_tokens=self._affinity.cached_tokens(
                marks, {view.endpoint: view.incarnation for view in verifiers}, now
            ),
            num_new_sessions={view.endpoint: fleet * self._num_sent(view) for view in verifiers},
            forward_s={endpoint: value for endpoint, value in forward_s.items() if value is not None},
            beginning=marks.name,
            tie_breaker=session_id,
        )
        chosen = choose_verifier(
            verifiers,
            spec.model,
            excluded=excluded,
            num_own_sessions=own,
            numerics_fingerprint=numerics_fingerprint,
            needs=needs,
        )
        # Noted at once, not when it has opened: the next of a burst is to go where this one's prompt is computed.
        self._affinity.note(marks, chosen.endpoint, chosen.incarnation, now)
        _put(self._sent, chosen.endpoint, (chosen.status, self._num_sent(chosen) + 1))
        return chosen

    def choose_drafter(
        self,
        drafters: Sequence[EndpointView],
        tokenizer_fingerprint: str,
        *,
        verifier: str,
        tenant: str,
        excluded: Collection[str] = (),
        num_own_sessions: Mapping[str, int] | None = None,
    ) -> EndpointView | None:
        """See the router's."""
        now = self._clock()

        def expected_tokens_per_s(view: EndpointView, num_sessions: int) -> float:
            return self._measurements.expected_tokens_per_s(
                view.endpoint,
                verifier,
                tenant,
                now,
                num_reported=num_reported_sessions(view),
                num_sessions=num_sessions,
                round_trip_time_s=view.round_trip_time_s,
            )

        return choose_drafter(
            drafters,
            tokenizer_fingerprint,
            excluded=excluded,
            num_own_sessions=num_own_sessions,
            expected_tokens_per_s=expected_tokens_per_s,
        )

    def note_round(self, drafter: str, verifier: str, tenant: str, statistics: RoundStatistics) -> None:
        """A round of a session was committed; `drafter` is empty where none is attached."""
        self._measurements.note(drafter, verifier, tenant, statistics, self._clock())

    def note_attach(self, verifier: str, attach_s: float) -> None:
        """An attach at that verifier came through after this time."""
        _put(self._hedge_delays, verifier, self._hedge_delays.get(verifier, HedgeDelay()).observed(attach_s))

    def hedge_delay_s(self, verifier: str) -> float:
        """How long an attach at that verifier may take until a second drafter is tried."""
        return self._hedge_delays.get(verifier, HedgeDelay()).delay_s

    def _num_sent(self, view: EndpointView) -> int:
        status, num_sent = self._sent.get(view.endpoint, (None, 0))
        return num_sent if status is view.status else 0


def _put(known: dict[str, Value], endpoint: str, value: Value) -> None:
    """Keeps what is known of at most `_MAX_KNOWN` servers: those that are gone are not told of here."""
    known.pop(endpoint, None)
    known[endpoint] = value
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


def _fleet(verifiers: Sequence[EndpointView], num_own_sessions: Mapping[str, int]) -> float:
    """How many orchestrators like this one send sessions, judged by all sessions and one's own: whoever sees the same
    loads at the same time fills the same gap, so each counts what it sends as often."""
    num_own = sum(num_own_sessions.get(view.endpoint, 0) for view in verifiers)
    num_all = sum(num_reported_sessions(view) for view in verifiers)
    return min(max(1.0, num_all / num_own), _MAX_FLEET) if num_own else 1.0
