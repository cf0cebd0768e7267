"""Drafters that bring what they truly bring, with noise, to sessions that come and go; and a router that must find out.

A drafter has an acceptance for each tenant, a way to each verifier, and drafts that take longer the more sessions it
has. Nothing is random but what a seeded generator gives.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence

from orchestrator.endpoints import EndpointView
from orchestrator.routing import Routing
from specdec.messages import Load, RoundStatistics, ServerStatus
from specdec.messages.cluster import Role
from specdec.params import NextTokenKind

NUM_DRAFT_TOKENS = 4
FORWARD_S = 0.03
ROUNDS = 40
LOOK_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True)
class SimulatedDrafter:
    """`accept_probs`: by tenant, the chance of each draft token after an accepted one. Times are in seconds."""

    endpoint: str
    accept_probs: dict[str, float]
    round_trip_s: dict[str, float]
    draft_s: float
    draft_s_per_session: float

    def mean_accepted(self, tenant: str) -> float:
        accept_prob = self.accept_probs[tenant]
        return sum(accept_prob**place for place in range(1, NUM_DRAFT_TOKENS + 1))

    def draft_time_s(self, num_sessions: int) -> float:
        return self.draft_s + self.draft_s_per_session * num_sessions

    def tokens_per_s(self, tenant: str, verifier: str, num_sessions: int) -> float:
        """What a session truly gets, of `num_sessions` at this drafter."""
        latency_s = self.round_trip_s[verifier] + self.draft_time_s(num_sessions)
        return (1 + self.mean_accepted(tenant)) / (FORWARD_S + latency_s)


@dataclasses.dataclass(frozen=True)
class SimulatedRequest:
    tenant: str
    verifier: str
    arrived_at: float


Choice = Callable[["DraftedSessions", SimulatedRequest], SimulatedDrafter]


class DraftedSessions:
    """Serves requests one after another as they come; each keeps its drafter for `ROUNDS` rounds."""

    def __init__(self, drafters: Sequence[SimulatedDrafter], seed: int) -> None:
        self.drafters = {drafter.endpoint: drafter for drafter in drafters}
        self.dice = random.Random(seed)
        self.now = 0.0
        self.routing = Routing(lambda: self.now)
        self.num_sessions = dict.fromkeys(self.drafters, 0)
        self.views: list[EndpointView] = []

    def serve(self, requests: Sequence[SimulatedRequest], choose: Choice) -> list[float]:
        """The tokens a second of each session, in the order of their arrival."""
        running: deque[tuple[float, SimulatedRequest, SimulatedDrafter, int]] = deque()
        rates, next_look = [], 0.0
        for request in requests:
            self.now = request.arrived_at
            while running and running[0][0] <= self.now:
                _, ended, drafter, num_sessions = running.popleft()
                self._tell(ended, drafter, num_sessions)
                self.num_sessions[drafter.endpoint] -= 1
            if self.now >= next_look:
                next_look = self.now + LOOK_INTERVAL_S
                self.views = [self._view(endpoint) for endpoint in self.drafters]
            drafter = choose(self, request)
            self.num_sessions[drafter.endpoint] += 1
            num_sessions = self.num_sessions[drafter.endpoint]
            rate = drafter.tokens_per_s(request.tenant, request.verifier, num_sessions)
            rates.append(rate)
            lasts_s = ROUNDS * (1 + drafter.mean_accepted(request.tenant)) / rate
            running.append((self.now + lasts_s, request, drafter, num_sessions))
            running = deque(sorted(running, key=lambda item: item[0]))
        return rates

    def _view(self, endpoint: str) -> EndpointView:
        load = Load(num_active_sessions=self.num_sessions[endpoint])
        return EndpointView(endpoint, Role.DRAFTER, healthy=True, status=ServerStatus(True, False, "0", 1, load=load))

    def _tell(self, request: SimulatedRequest, drafter: SimulatedDrafter, num_sessions: int) -> None:
        """The rounds of a session, as its verifier measured them."""
        for _ in range(ROUNDS):
            num_accepted = 0
            while num_accepted < NUM_DRAFT_TOKENS and self.dice.random() < drafter.accept_probs[request.tenant]:
                num_accepted += 1
            noise = self.dice.uniform(0.7, 1.3)
            statistics = RoundStatistics(
                num_draft_tokens=NUM_DRAFT_TOKENS,
                num_accepted_tokens=num_accepted,
                next_token_kind=NextTokenKind.RECOVERED,
                total_time_s=FORWARD_S,
                verify_forward_time_s=FORWARD_S,
                queue_time_s=0.0,
                draft_time_s=drafter.draft_time_s(num_sessions) * noise,
                round_trip_time_s=drafter.round_trip_s[request.verifier] * noise,
            )
            self.routing.note_round(drafter.endpoint, request.verifier, request.tenant, statistics)


def by_router(sessions: DraftedSessions, request: SimulatedRequest) -> SimulatedDrafter:
    view = sessions.routing.choose_drafter(
        sessions.views,
        "",
        verifier=request.verifier,
        tenant=request.tenant,
        num_own_sessions=sessions.num_sessions,
    )
    if view is None:
        raise RuntimeError("no drafter was chosen of several that take sessions")
    return sessions.drafters[view.endpoint]


def by_chance(sessions: DraftedSessions, request: SimulatedRequest) -> SimulatedDrafter:
    return sessions.dice.choice(list(sessions.drafters.values()))


def by_knowing_everything(sessions: DraftedSessions, request: SimulatedRequest) -> SimulatedDrafter:
    """The one that truly brings this session most at this moment."""
    return max(
        sessions.drafters.values(),
        key=lambda drafter: drafter.tokens_per_s(
            request.tenant, request.verifier, sessions.num_sessions[drafter.endpoint] + 1
        ),
    )
