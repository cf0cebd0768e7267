"""Draft budgets follow the load: full when idle, shrinking, none at saturation, and no flapping. In virtual time."""

import itertools
import random

import numpy as np
import pytest

from verifier_service.budgets import share_rows
from verifier_service.expected_gains import ExpectedGains
from verifier_service.forward_times import ForwardTimes

MAX_ROWS = 128
NUM_PLACES = 16


def memory_bound_s(num_rows: float) -> float:
    """Eight rows cost what one costs; from there each costs a twentieth more."""
    return 0.1 * (1 + 0.05 * max(0.0, num_rows - 8))


FORWARD_S = np.array([memory_bound_s(num_rows) for num_rows in range(MAX_ROWS + 1)])


def shared(num_sessions: int, acceptance: float = 0.7, before: int | np.ndarray = 0, **changes) -> np.ndarray:
    gains = np.tile(acceptance ** np.arange(1, NUM_PLACES + 1), (num_sessions, 1))
    arguments = {
        "gains": gains,
        "limits": np.full(num_sessions, NUM_PLACES),
        "before": np.full(num_sessions, before) if isinstance(before, int) else before,
        "num_rounds": num_sessions,
        "num_other_rows": num_sessions,
        "forward_s": FORWARD_S,
    }
    return share_rows(**{**arguments, **changes})


def test_a_lone_session_has_its_full_budget_whatever_it_accepts():
    assert shared(1, acceptance=0.05).tolist() == [NUM_PLACES]


def test_budgets_shrink_with_the_number_of_sessions_and_end_at_none():
    means = [shared(num_sessions).mean() for num_sessions in (1, 2, 4, 8, 16, 32, 64, 120)]
    assert means == sorted(means, reverse=True)
    assert means[0] == NUM_PLACES
    assert means[3] >= 1
    steep = FORWARD_S[0] * np.arange(MAX_ROWS + 1)
    assert shared(32, forward_s=steep).sum() == 0


def test_forwards_that_are_flat_in_their_rows_give_every_session_a_budget():
    flat = np.full(MAX_ROWS + 1, 0.03)
    assert (shared(6, forward_s=flat) >= 10).all()


def test_no_step_has_more_rows_than_it_may():
    flat = np.full(21, 0.03)
    assert shared(8, forward_s=flat).sum() == 20 - 8
    assert shared(30, forward_s=flat).sum() == 0


def test_the_session_that_accepts_more_gets_more_and_a_limit_holds():
    gains = np.array([0.9 ** np.arange(1, 9), 0.3 ** np.arange(1, 9), 0.9 ** np.arange(1, 9)])
    limits = np.array([8, 8, 2])
    budgets = share_rows(gains, limits, np.zeros(3, dtype=int), 3, 6, FORWARD_S)
    assert budgets[0] > budgets[1]
    assert budgets[2] <= 2


def test_a_load_that_wavers_by_one_session_does_not_turn_drafters_on_and_off():
    before, num_switches = np.zeros(24, dtype=int), 0
    for step in range(200):
        num_sessions = 23 + step % 2
        budgets = shared(num_sessions, before=before[:num_sessions])
        num_switches += int(((budgets > 0) != (before[:num_sessions] > 0)).sum()) if step > 10 else 0
        before[:num_sessions] = budgets
    assert num_switches <= 4


# --- Gains -----------------------------------------------------------------------------------------------------------


def test_gains_begin_at_the_prior_and_follow_what_is_accepted():
    gains = ExpectedGains(NUM_PLACES)
    good, bad, new = (gains.add() for _ in range(3))
    for _ in range(100):
        gains.observe([good, bad], [4, 4], [4, 0])
    learned = gains.of([good, bad, new])
    assert learned[0, 3] > 0.8
    assert learned[1, 0] < 0.15
    assert learned[2, 0] == pytest.approx(0.7)
    assert (np.diff(learned, axis=1) <= 0).all()


def test_a_lookup_that_seldom_guesses_but_then_copies_far_is_worth_its_rows():
    gains = ExpectedGains(NUM_PLACES)
    slot = gains.add()
    for index in range(200):
        gains.observe([slot], [12 if index % 2 else 1], [12 if index % 4 == 1 else 0])
    assert gains.of([slot])[0, 10] > 0.2


def test_acceptance_that_is_not_measured_drifts_back_to_its_prior():
    gains = ExpectedGains(NUM_PLACES)
    slot = gains.add()
    for _ in range(100):
        gains.observe([slot], [4], [0])
    low = gains.of([slot])[0, 0]
    for _ in range(3000):
        gains.observe([slot], [0], [0])
    assert low < 0.2
    assert gains.of([slot])[0, 0] > 0.6


def test_a_slot_used_again_remembers_nothing():
    gains = ExpectedGains(NUM_PLACES)
    slots = [gains.add() for _ in range(20)]
    gains.observe(slots, [4] * 20, [0] * 20)
    gains.remove(slots[7])
    again = gains.add()
    assert again == slots[7]
    assert gains.of([again])[0, 0] == pytest.approx(0.7)


# --- A server in virtual time ----------------------------------------------------------------------------------------


class Simulation:
    """Sessions come and go, each with a true acceptance and, in every step, a draft.

    A draft is as long as its drafter would make it for a lone session, knowing its acceptance, and within the budget.
    """

    def __init__(self, seed: int, *, drafts: bool) -> None:
        self.generator = random.Random(seed)
        self.drafts = drafts
        self.times, self.gains = ForwardTimes(), ExpectedGains(NUM_PLACES)
        self.acceptance: dict[int, float] = {}
        self.budget: dict[int, int] = {}
        self.clock_s, self.num_tokens, self.num_switches = 0.0, 0, 0
        self.mean_budgets: dict[int, list[float]] = {}

    def load(self, num_sessions: int, num_steps: int) -> float:
        """Tokens per second at a number of sessions."""
        while len(self.acceptance) < num_sessions:
            slot = self.gains.add()
            self.acceptance[slot], self.budget[slot] = self.generator.choice([0.2, 0.6, 0.9]), 0
        while len(self.acceptance) > num_sessions:
            slot = self.generator.choice(list(self.acceptance))
            del self.acceptance[slot], self.budget[slot]
            self.gains.remove(slot)
        started_s, num_tokens = self.clock_s, self.num_tokens
        for _ in range(num_steps):
            self._step()
        return (self.num_tokens - num_tokens) / (self.clock_s - started_s)

    def _step(self) -> None:
        slots = list(self.acceptance)
        lengths = [min(self.budget[slot], self._own_choice(self.acceptance[slot])) for slot in slots]
        num_rows = len(slots) + sum(lengths)
        forward_s = memory_bound_s(num_rows) * (1 + 0.02 * self.generator.random())
        self.clock_s += forward_s
        self.times.observe(num_rows, forward_s)
        accepted = [self._accepted(self.acceptance[slot], length) for slot, length in zip(slots, lengths, strict=True)]
        self.num_tokens += len(slots) + sum(accepted)
        self.gains.observe(slots, lengths, accepted)
        if not self.drafts:
            return
        before = np.array([self.budget[slot] for slot in slots])
        limits = np.full(len(slots), NUM_PLACES)
        table = self.times.table(MAX_ROWS)
        budgets = share_rows(self.gains.of(slots), limits, before, len(slots), len(slots), table)
        self.num_switches += int(((before > 0) != (budgets > 0)).sum())
        self.budget = dict(zip(slots, budgets.tolist(), strict=True))
        self.mean_budgets.setdefault(len(slots), []).append(float(budgets.mean()))

    def _own_choice(self, acceptance: float) -> int:
        rates = [
            sum(acceptance**place for place in range(length + 1)) / memory_bound_s(1 + length)
            for length in range(NUM_PLACES + 1)
        ]
        return rates.index(max(rates))

    def _accepted(self, acceptance: float, num_drafted: int) -> int:
        num_accepted = 0
        while num_accepted < num_drafted and self.generator.random() < acceptance:
            num_accepted += 1
        return num_accepted


@pytest.mark.parametrize("seed", range(3))
def test_over_a_load_that_rises_and_falls_drafting_never_costs_more_than_its_probes(seed):
    loads = [1, 2, 4, 8, 16, 32, 64, 100, 64, 32, 16, 8, 4, 2, 1]
    with_drafts, alone = Simulation(seed, drafts=True), Simulation(seed, drafts=False)
    for num_sessions in loads:
        rate, alone_rate = with_drafts.load(num_sessions, 150), alone.load(num_sessions, 150)
        assert rate > 0.97 * alone_rate, num_sessions
        if num_sessions <= 4:
            assert rate > 1.15 * alone_rate, num_sessions
    means = {count: sum(budgets[30:]) / len(budgets[30:]) for count, budgets in with_drafts.mean_budgets.items()}
    by_load = [means[num_sessions] for num_sessions in sorted(means)]
    assert by_load[0] == NUM_PLACES
    assert all(later <= earlier + 0.5 for earlier, later in itertools.pairwise(by_load))


def test_at_a_steady_load_drafters_are_seldom_turned_on_or_off():
    simulation = Simulation(5, drafts=True)
    simulation.load(24, 200)
    settled = simulation.num_switches
    simulation.load(24, 500)
    assert simulation.num_switches - settled < 0.02 * 24 * 500
