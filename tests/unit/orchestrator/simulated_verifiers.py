"""Verifiers that cost time and blocks but compute nothing, orchestrators that see them a second late, and their load.

A verifier admits sessions while their tokens fit its cache, reads one prompt at a time, and decodes all others in steps
that grow with their number. The beginnings that prompts share stay cached, least recently used first out. Time goes in
ticks; nothing here is random but what a seeded generator gives.
"""

import dataclasses
import random
from collections import OrderedDict, deque
from collections.abc import Callable

from orchestrator.endpoints import EndpointView
from orchestrator.routing import Routing
from specdec.ids import SessionId
from specdec.messages import Load, ModelInfo, RoundStatistics, ServerStatus
from specdec.messages.cluster import Role
from specdec.params import GenerationSpec, NextTokenKind

TICK_S = 0.02
LOOK_INTERVAL_S = 1.0
FORWARD_S = 0.02
ROWS_THAT_DOUBLE_A_FORWARD = 40
PREFILL_S = 0.00005
TOKEN_BYTES = 1000
CHARACTERS_PER_TOKEN = 4


@dataclasses.dataclass
class SimulatedSession:
    """One prompt with the beginning that it shares with others, and how far it is."""

    name: SessionId
    beginning: int
    num_shared_tokens: int
    num_own_tokens: int
    num_output_tokens: int
    spec: GenerationSpec
    arrived_at: float
    orchestrator: int
    num_cached_tokens: int = 0
    prefill_left: float = 0.0
    num_decoded: float = 0.0
    ended_at: float = 0.0

    @property
    def held_tokens(self) -> int:
        """Besides the shared beginning."""
        return self.num_own_tokens + self.num_output_tokens


class SimulatedVerifier:
    def __init__(self, endpoint: str, slowness: float, budget_tokens: int) -> None:
        self.endpoint = endpoint
        self.slowness = slowness
        self.budget_tokens = budget_tokens
        self.waiting: deque[SimulatedSession] = deque()
        self.running: list[SimulatedSession] = []
        self.cached: OrderedDict[int, int] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def load(self) -> float:
        """Sessions in proportion to speed."""
        return self.num_sessions * self.slowness

    @property
    def forward_s(self) -> float:
        return FORWARD_S * self.slowness * (1 + len(self.running) / ROWS_THAT_DOUBLE_A_FORWARD)

    @property
    def used_tokens(self) -> int:
        held = {session.beginning: session.num_shared_tokens for session in self.running}
        return sum(held.values()) + sum(session.held_tokens for session in self.running)

    def status(self) -> ServerStatus:
        load = Load(
            len(self.running), len(self.waiting), self.used_tokens * TOKEN_BYTES, self.budget_tokens * TOKEN_BYTES
        )
        return ServerStatus(True, False, "0", 1, model=ModelInfo("m", 1, 1, "f"), load=load)

    def expected_s(self, session: SimulatedSession) -> float:
        """What is known of a session's time here by somebody who sees everything."""
        num_cached = self.cached.get(session.beginning, 0)
        own = session.num_shared_tokens + session.num_own_tokens - num_cached
        prefill_s = (own + sum(one.prefill_left for one in self.running)) * PREFILL_S
        prefill_s += sum(one.num_shared_tokens + one.num_own_tokens for one in self.waiting) * PREFILL_S
        forward_s = FORWARD_S * (1 + (self.num_sessions + 1) / ROWS_THAT_DOUBLE_A_FORWARD)
        return self.slowness * (prefill_s + session.num_output_tokens * forward_s)

    def tick(self, now: float) -> list[SimulatedSession]:
        """The sessions that end in this tick."""
        self._admit()
        left_s = TICK_S
        prompts = [session for session in self.running if session.prefill_left > 0]
        decoding = [session for session in self.running if session.prefill_left <= 0]
        if prompts:
            share_s = TICK_S / 2 if decoding else TICK_S
            left_s -= share_s
            prompts[0].prefill_left -= share_s / (PREFILL_S * self.slowness)
        ended = []
        for session in decoding:
            session.num_decoded += left_s / self.forward_s
            if session.num_decoded >= session.num_output_tokens:
                session.ended_at = now
                ended.append(session)
        for session in ended:
            self.running.remove(session)
        return ended

    def _admit(self) -> None:
        while self.waiting:
            session = self.waiting[0]
            in_use = {one.beginning for one in self.running}
            own = session.held_tokens + (0 if session.beginning in in_use else session.num_shared_tokens)
            if self.running and self.used_tokens + own > self.budget_tokens:
                return
            session.num_cached_tokens = self.cached.get(session.beginning, 0)
            session.prefill_left = session.num_shared_tokens + session.num_own_tokens - session.num_cached_tokens
            self.cached[session.beginning] = session.num_shared_tokens
            self.cached.move_to_end(session.beginning)
            self.running.append(self.waiting.popleft())
            in_use.add(session.beginning)
            idle = [beginning for beginning in self.cached if beginning not in in_use]
            room = self.budget_tokens - self.used_tokens
            while idle and sum(self.cached[one] for one in idle) > room:
                del self.cached[idle.pop(0)]


Choice = Callable[["SimulatedCluster", SimulatedSession], SimulatedVerifier]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`imbalance`: of load, in proportion to speed, the highest verifier's over the mean, averaged over time.
    `hit_rate`: of the tokens that prompts share with others, those that were found in a cache; `most_hits`: the same if
    every beginning were computed once and kept for good, everywhere."""

    imbalance: float
    hit_rate: float
    most_hits: float
    mean_time_s: float
    p99_time_s: float


class SimulatedCluster:
    """Verifiers and the orchestrators before them, each of which looks once a second, at its own moment."""

    def __init__(self, verifiers: list[SimulatedVerifier], num_orchestrators: int, seed: int) -> None:
        self.verifiers = {verifier.endpoint: verifier for verifier in verifiers}
        self.dice = random.Random(seed)
        self.now = 0.0
        self.routings = [Routing(lambda: self.now) for _ in range(num_orchestrators)]
        self.views: list[list[EndpointView]] = [[] for _ in self.routings]
        self.own: list[dict[str, int]] = [dict.fromkeys(self.verifiers, 0) for _ in self.routings]
        self._next_looks = [LOOK_INTERVAL_S * index / num_orchestrators for index in range(num_orchestrators)]
        for index in range(num_orchestrators):
            self._look(index)

    def serve(self, sessions: list[SimulatedSession], choose: Choice) -> Outcome:
        imbalances, ended = [], []
        arriving = deque(sessions)
        while arriving or any(verifier.num_sessions for verifier in self.verifiers.values()):
            for index, at in enumerate(self._next_looks):
                if self.now >= at:
                    self._next_looks[index] += LOOK_INTERVAL_S
                    self._look(index)
            while arriving and arriving[0].arrived_at <= self.now:
                session = arriving.popleft()
                verifier = choose(self, session)
                verifier.waiting.append(session)
                self.own[session.orchestrator][verifier.endpoint] += 1
            for verifier in self.verifiers.values():
                for session in verifier.tick(self.now):
                    ended.append(session)
                    self.own[session.orchestrator][verifier.endpoint] -= 1
            loads = [verifier.load for verifier in self.verifiers.values()]
            if arriving and sum(loads) >= len(loads):
                imbalances.append(max(loads) * len(loads) / sum(loads))
            self.now += TICK_S
        num_shared_tokens = sum(one.num_shared_tokens for one in ended)
        computed_once = sum({one.beginning: one.num_shared_tokens for one in ended}.values())
        times = sorted(session.ended_at - session.arrived_at for session in ended)
        return Outcome(
            imbalance=sum(imbalances) / len(imbalances),
            hit_rate=sum(one.num_cached_tokens for one in ended) / num_shared_tokens,
            most_hits=1 - computed_once / num_shared_tokens,
            mean_time_s=sum(times) / len(times),
            p99_time_s=times[len(times) * 99 // 100],
        )

    def _look(self, index: int) -> None:
        self.views[index] = [
            EndpointView(endpoint, Role.VERIFIER, healthy=True, status=verifier.status(), incarnation=1)
            for endpoint, verifier in self.verifiers.items()
        ]
        for verifier in self.verifiers.values():
            statistics = RoundStatistics(0, 0, NextTokenKind.PLAIN, verifier.forward_s, verifier.forward_s, 0.0)
            self.routings[index].note_round("", verifier.endpoint, "", statistics)


def sessions_with_shared_beginnings(
    num_sessions: int, num_beginnings: int, rate_per_s: float, num_orchestrators: int, seed: int
) -> list[SimulatedSession]:
    """Poisson arrivals; the k-th beginning is 1/k as popular as the first (Zipf)."""
    dice = random.Random(seed)
    lengths = [dice.randrange(500, 3500) for _ in range(num_beginnings)]
    texts = [f"{index} " * (length * CHARACTERS_PER_TOKEN // 2) for index, length in enumerate(lengths)]
    texts = [text[: length * CHARACTERS_PER_TOKEN] for text, length in zip(texts, lengths, strict=True)]
    weights = [1 / (rank + 1) for rank in range(num_beginnings)]
    now, sessions = 0.0, []
    for number in range(num_sessions):
        now += dice.expovariate(rate_per_s)
        (beginning,) = dice.choices(range(num_beginnings), weights)
        num_own = dice.randrange(50, 500)
        own = f"{number}!" * num_own
        sessions.append(
            SimulatedSession(
                name=SessionId(f"s{number}"),
                beginning=beginning,
                num_shared_tokens=lengths[beginning],
                num_own_tokens=num_own,
                num_output_tokens=dice.randrange(40, 200),
                spec=GenerationSpec(texts[beginning] + own[: num_own * CHARACTERS_PER_TOKEN], model="m"),
                arrived_at=now,
                orchestrator=dice.randrange(num_orchestrators),
            )
        )
    return sessions


def by_router(cluster: SimulatedCluster, session: SimulatedSession) -> SimulatedVerifier:
    index = session.orchestrator
    view = cluster.routings[index].choose_verifier(
        cluster.views[index], session.name, session.spec, "", num_own_sessions=cluster.own[index]
    )
    return cluster.verifiers[view.endpoint]


def by_chance(cluster: SimulatedCluster, session: SimulatedSession) -> SimulatedVerifier:
    return cluster.dice.choice(list(cluster.verifiers.values()))


def by_seeing_everything(cluster: SimulatedCluster, session: SimulatedSession) -> SimulatedVerifier:
    """Where this session ends first, by exact loads, caches and speeds at this moment."""
    return min(cluster.verifiers.values(), key=lambda verifier: (verifier.expected_s(session), verifier.endpoint))
