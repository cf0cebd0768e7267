"""The router against one that sees everything, and against chance, over thousands of simulated sessions.

Run with -s to see the figures; docs/adr/0017 quotes them. All is seeded: the bounds hold or they do not.
"""

import random

import pytest

from tests.unit.orchestrator import simulated_drafters, simulated_verifiers
from tests.unit.orchestrator.simulated_drafters import DraftedSessions, SimulatedDrafter, SimulatedRequest
from tests.unit.orchestrator.simulated_verifiers import (
    Choice,
    Outcome,
    SimulatedCluster,
    SimulatedVerifier,
    sessions_with_shared_beginnings,
)

UNEQUAL = (1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.5, 2.5)
EQUAL = (1.0,) * 6
BUDGET_TOKENS = 80_000
TENANTS = ("code", "chat", "law", "verse")
VERIFIERS = ("v:1", "v:2")


def served(
    choose: Choice,
    slownesses: tuple[float, ...],
    *,
    num_sessions: int,
    num_beginnings: int,
    rate_per_s: float,
    num_orchestrators: int,
    seed: int = 1,
) -> Outcome:
    sessions = sessions_with_shared_beginnings(num_sessions, num_beginnings, rate_per_s, num_orchestrators, seed)
    verifiers = [SimulatedVerifier(f"v{index}:1", each, BUDGET_TOKENS) for index, each in enumerate(slownesses)]
    outcome = SimulatedCluster(verifiers, num_orchestrators, seed).serve(sessions, choose)
    print(
        f"{choose.__name__} ({num_orchestrators} orchestrators, {num_beginnings} beginnings, {rate_per_s:g} a second): "
        f"load max/mean {outcome.imbalance:.2f}, shared tokens found cached {outcome.hit_rate:.0%} "
        f"of at most {outcome.most_hits:.0%}, "
        f"time of a session {outcome.mean_time_s:.2f} s, p99 {outcome.p99_time_s:.1f} s"
    )
    return outcome


@pytest.mark.parametrize("num_orchestrators", [1, 4])
def test_sessions_with_shared_beginnings_end_nearly_as_soon_as_if_everything_were_known(num_orchestrators: int) -> None:
    def serve(choose: Choice) -> Outcome:
        return served(
            choose,
            UNEQUAL,
            num_sessions=1500,
            num_beginnings=200,
            rate_per_s=25,
            num_orchestrators=num_orchestrators,
        )

    routed = serve(simulated_verifiers.by_router)
    chance = serve(simulated_verifiers.by_chance)
    best = serve(simulated_verifiers.by_seeing_everything)
    assert routed.mean_time_s < 1.1 * best.mean_time_s
    assert routed.mean_time_s < 0.6 * chance.mean_time_s
    assert routed.hit_rate > 0.9 * best.hit_rate
    assert routed.hit_rate > 0.75 * routed.most_hits
    assert routed.hit_rate > 1.25 * chance.hit_rate
    assert routed.imbalance < best.imbalance
    assert routed.imbalance < 1.6


def test_a_prompt_that_most_ask_for_does_not_overload_the_verifier_that_has_it() -> None:
    def serve(choose: Choice) -> Outcome:
        return served(choose, EQUAL, num_sessions=1500, num_beginnings=2, rate_per_s=30, num_orchestrators=4)

    routed, chance = serve(simulated_verifiers.by_router), serve(simulated_verifiers.by_chance)
    best = serve(simulated_verifiers.by_seeing_everything)
    assert routed.imbalance < 1.5
    assert routed.imbalance < chance.imbalance
    assert routed.mean_time_s < 1.1 * best.mean_time_s


def test_prompts_that_share_nothing_are_spread_all_the_same() -> None:
    def serve(choose: Choice) -> Outcome:
        return served(choose, EQUAL, num_sessions=1000, num_beginnings=1000, rate_per_s=20, num_orchestrators=4)

    routed, chance = serve(simulated_verifiers.by_router), serve(simulated_verifiers.by_chance)
    assert routed.imbalance < 0.9 * chance.imbalance
    assert routed.mean_time_s < chance.mean_time_s


@pytest.mark.parametrize("rate_per_s", [3.0, 20.0])
def test_drafters_that_nobody_knew_soon_bring_nearly_what_the_best_would(rate_per_s: float) -> None:
    drafters, requests = some_drafters(seed=2), some_requests(1000, rate_per_s, seed=2)
    routed = DraftedSessions(drafters, 2).serve(requests, simulated_drafters.by_router)
    chance = DraftedSessions(drafters, 2).serve(requests, simulated_drafters.by_chance)
    best = DraftedSessions(drafters, 2).serve(requests, simulated_drafters.by_knowing_everything)
    early, late = slice(0, 200), slice(200, None)
    for part, name in ((early, "first 200"), (late, "then")):
        print(
            f"{rate_per_s:g} sessions a second, {name}: of the best drafters' tokens a second "
            f"{sum(routed[part]) / sum(best[part]):.0%}, at random {sum(chance[part]) / sum(best[part]):.0%}"
        )
    assert sum(routed[late]) > 0.93 * sum(best[late])
    assert sum(routed[early]) > 0.85 * sum(best[early])
    assert sum(routed) > 1.2 * sum(chance)


def some_drafters(seed: int) -> list[SimulatedDrafter]:
    """Six that differ in everything: what they bring to whom, how far and how slow they are, how crowds slow them."""
    dice = random.Random(seed)
    drafters = []
    for index in range(6):
        base = dice.uniform(0.3, 0.7)
        drafters.append(
            SimulatedDrafter(
                f"d{index}:1",
                {tenant: min(0.95, max(0.05, base + dice.uniform(-0.3, 0.3))) for tenant in TENANTS},
                {verifier: dice.choice([0.001, 0.005, 0.03]) for verifier in VERIFIERS},
                dice.choice([0.001, 0.005, 0.015]),
                dice.choice([0.0002, 0.001]),
            )
        )
    return drafters


def some_requests(num_requests: int, rate_per_s: float, seed: int) -> list[SimulatedRequest]:
    dice = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(num_requests):
        now += dice.expovariate(rate_per_s)
        requests.append(SimulatedRequest(dice.choice(TENANTS), dice.choice(VERIFIERS), now))
    return requests
