"""The draft length policy against simulated verifiers, drafters and texts."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from drafter_service.draft_length import AcceptancePerPosition, DraftLengthPolicy, ModelDrafts
from drafter_service.verify_times import VerifyTimes

BUDGET = 16


def qwen_like(num_rows: int) -> float:
    """A verifier that is flat up to six rows, then steps."""
    if num_rows <= 6:
        return 0.146 + 0.004 * (num_rows - 1)
    return 0.32 if num_rows <= 12 else 0.446


def flat(num_rows: int) -> float:
    """A verifier with rows to spare, as an accelerator is."""
    return 0.06 + 0.0003 * num_rows


@dataclasses.dataclass
class Run:
    tokens_per_s: float
    lengths: list[int]
    num_switches: int


def simulate(
    verify_s: Callable[[int], float],
    accept: Callable[[int], float],
    step_s: float,
    seed: int,
    num_rounds: int = 400,
    shared: tuple[VerifyTimes, ModelDrafts] | None = None,
) -> Run:
    """A session whose model guesses each token right with probability accept(round), with noise on all times."""
    rng = random.Random(seed)
    times, drafts = shared or (VerifyTimes(), ModelDrafts())
    policy = DraftLengthPolicy(times, drafts, max_tokens=64)
    elapsed_s, num_tokens, num_switches, lengths = 0.0, 0, 0, []
    for round_ in range(num_rounds):
        was_on = policy.is_on
        plan = policy.plan(BUDGET)
        num_draft = min(plan.max_tokens, plan.limits.max_model_tokens or 0)
        num_switches += policy.is_on != was_on
        draft_s = num_draft * step_s * rng.uniform(0.95, 1.1)
        verdict_s = verify_s(1 + num_draft) * rng.uniform(0.92, 1.08)
        num_accepted = 0
        while num_accepted < num_draft and rng.random() < accept(round_):
            num_accepted += 1
        if num_draft:
            drafts.observe_time(num_draft, 0, draft_s)
            policy.observe_model_draft(num_draft, num_accepted)
        times.observe(1 + num_draft, verdict_s)
        elapsed_s += draft_s + verdict_s
        num_tokens += num_accepted + 1
        lengths.append(num_draft)
    return Run(num_tokens / elapsed_s, lengths, num_switches)


def best_fixed(verify_s: Callable[[int], float], accept: float, step_s: float) -> float:
    """Expected tokens per second of the best fixed length, 0 included."""
    return max(sum(accept**n for n in range(k + 1)) / (k * step_s + verify_s(1 + k)) for k in range(BUDGET + 1))


@pytest.mark.parametrize("verify_s", [qwen_like, flat])
@pytest.mark.parametrize(("accept", "step_s"), [(0.7, 0.03), (0.85, 0.03), (0.95, 0.03), (0.85, 0.005), (0.95, 0.005)])
def test_the_rate_comes_close_to_the_best_fixed_length(
    verify_s: Callable[[int], float], accept: float, step_s: float
) -> None:
    rates = [simulate(verify_s, lambda _: accept, step_s, seed).tokens_per_s for seed in range(6)]
    mean = sum(rates) / len(rates)
    assert mean > 0.94 * best_fixed(verify_s, accept, step_s)  # learning and luck of the draw included


def test_lengths_stop_at_a_step_of_the_verifier_and_run_on_where_there_is_none() -> None:
    stepped = simulate(qwen_like, lambda _: 0.95, 0.03, seed=3).lengths[-50:]
    free = simulate(flat, lambda _: 0.97, 0.003, seed=3).lengths[-50:]
    assert max(set(stepped), key=stepped.count) == 5
    assert sum(free) / len(free) > 9


@pytest.mark.parametrize("step_s", [0.06, 0.15])
def test_speculation_that_cannot_pay_is_off_and_costs_little(step_s: float) -> None:
    for seed in range(5):
        run = simulate(flat, lambda _: 0.3, step_s, seed, num_rounds=600)
        assert run.lengths[-400:].count(0) > 390
        assert run.tokens_per_s > 0.96 / flat(1)  # the first drafts, made to find out, included


def test_a_session_that_starts_where_others_found_speculation_useless_hardly_drafts() -> None:
    shared = (VerifyTimes(), ModelDrafts())
    for seed in range(3):
        simulate(flat, lambda _: 0.2, 0.06, seed, num_rounds=100, shared=shared)
    run = simulate(flat, lambda _: 0.2, 0.06, seed=9, num_rounds=100, shared=shared)
    assert run.tokens_per_s > 0.97 / flat(1)


def test_it_does_not_oscillate() -> None:
    for seed in range(5):
        for accept in (0.2, 0.5, 0.8):
            assert simulate(qwen_like, lambda _, accept=accept: accept, 0.03, seed, 600).num_switches <= 4


def test_it_comes_back_when_the_text_becomes_easy() -> None:
    run = simulate(flat, lambda round_: 0.1 if round_ < 200 else 0.95, 0.03, seed=5, num_rounds=1200)
    assert run.lengths[100:200].count(0) > 90
    assert sum(run.lengths[-100:]) / 100 > 2


def test_nothing_is_planned_without_a_budget() -> None:
    policy = DraftLengthPolicy(VerifyTimes(), ModelDrafts(), 8)
    assert policy.plan(0).max_tokens == 0


def test_the_verifier_alone_is_measured_once_as_the_yardstick() -> None:
    times = VerifyTimes()
    policy = DraftLengthPolicy(times, ModelDrafts(), 8)
    assert policy.plan(8).max_tokens > 0
    times.observe(5, 0.1)
    assert policy.plan(8).max_tokens == 0
    times.observe(1, 0.09)
    assert policy.plan(8).max_tokens > 0


def known_verifier() -> VerifyTimes:
    times = VerifyTimes()
    for num_rows in (1, 2, 6, 7, 12, 13):
        times.observe(num_rows, qwen_like(num_rows))
    return times


def test_a_free_guess_is_cut_where_rows_cost_more_than_they_bring() -> None:
    policy = DraftLengthPolicy(known_verifier(), ModelDrafts(), 64)
    unsure = [0.6 * 0.7**i for i in range(12)]
    certain = [0.995**i for i in range(12)]
    assert 1 <= policy.num_tokens_worth_sending(unsure, 0.0) <= 5
    assert policy.num_tokens_worth_sending(certain, 0.0) in (5, 11)
    assert policy.num_tokens_worth_sending([0.001] * 12, 0.0) == 0
    assert policy.num_tokens_worth_sending([], 0.0) == 0


def test_late_drafts_make_the_next_ones_shorter_and_timely_ones_longer_again() -> None:
    drafts = ModelDrafts()
    drafts.observe_time(1, 0, 0.001)
    policy = DraftLengthPolicy(known_verifier(), drafts, 64)
    before = policy.plan(5).limits.max_model_tokens
    policy.observe_late_draft(5)
    assert policy.plan(5).limits.max_model_tokens == 2
    for _ in range(10):
        policy.observe_model_draft(2, 2)
    assert policy.plan(5).limits.max_model_tokens == before


def test_a_first_draft_that_had_a_prompt_to_read_does_not_say_that_steps_are_slow() -> None:
    drafts = ModelDrafts()
    drafts.observe_time(4, 32, 1.6)  # 12 times a step, beside a verifier that reads the prompt too
    for _ in range(6):
        drafts.observe_time(1, 1, 0.06)
    assert drafts.step_s < 0.065


def test_a_step_must_be_likelier_to_count_where_steps_are_dearer() -> None:
    thresholds = []
    for step_s in (0.005, 0.03, 0.06):
        drafts = ModelDrafts()
        drafts.observe_time(1, 0, step_s)
        thresholds.append(DraftLengthPolicy(known_verifier(), drafts, 64).plan(16).limits.min_reach_prob)
    assert thresholds == sorted(thresholds)
    assert 0 < thresholds[0] < thresholds[-1] < 1


def test_acceptance_is_learned_for_each_place() -> None:
    acceptance = AcceptancePerPosition(prior=0.75)
    for _ in range(100):
        acceptance.observe(4, 2)  # the third is always wrong
    reach = acceptance.reach_probs(4)
    assert reach[1] > 0.7
    assert reach[2] < 0.2
