"""Speculation goes on only where it decides more tokens a second: in virtual time, with forwards that waver."""

import dataclasses
import random as randomness
from collections.abc import Hashable

import pytest

from verifier_service.speculation_trials import (
    FIRST_REST_STEPS,
    MAX_REST_STEPS,
    MAX_SETTLING_STEPS,
    MAX_STEPS_UNTOLD,
    MeasuredStep,
    SpeculationTrials,
)

FORWARD_S = 0.1
MIX = "mix"


@dataclasses.dataclass
class Load:
    """Sessions that all run all the time; each that speculates brings tokens, and makes the step longer."""

    trials: SpeculationTrials
    num_sessions: int
    tokens_per_round: float
    step_s_of_all: float
    """Of a step in which all speculate; each session pays its part."""
    session: Hashable = "s"
    mix: Hashable = MIX
    drafts_come: bool = True
    slowdown: float = 1.0
    random: randomness.Random = dataclasses.field(default_factory=lambda: randomness.Random(1))
    elapsed_s: float = 0.0
    num_tokens: int = 0

    def speculating(self, *, has_prompts: bool = False) -> int:
        lone = self.session if self.num_sessions == 1 else None
        return self.trials.num_speculating(
            self.num_sessions, self.num_sessions, self.mix, lone, has_prompts=has_prompts
        )

    def run(self, num_steps: int, has_prompts: bool = False) -> "Load":
        for _ in range(num_steps):
            num_speculating = self.speculating(has_prompts=has_prompts)
            share = num_speculating / self.num_sessions
            step_s = (
                self.slowdown * (FORWARD_S + share * (self.step_s_of_all - FORWARD_S)) * self.random.uniform(0.95, 1.1)
            )
            extra = sum(self.random.random() for _ in range(num_speculating)) * 2 * (self.tokens_per_round - 1)
            num_tokens = self.num_sessions + round(extra)
            drafters = range(num_speculating if self.drafts_come else 0)
            step = MeasuredStep(
                self.num_sessions, self.num_sessions, num_tokens, step_s, num_speculating, drafters, has_prompts
            )
            self.trials.observe(self.mix, step, 1.3 * FORWARD_S)
            self.elapsed_s += step_s
            self.num_tokens += num_tokens
        return self

    @property
    def speedup(self) -> float:
        """Over steps without drafts."""
        return self.num_tokens / self.num_sessions * FORWARD_S * 1.025 / self.elapsed_s


@pytest.mark.parametrize("num_sessions", [2, 4, 16, 64])
def test_drafts_that_cost_more_than_they_bring_are_given_up_and_hardly_slow_anybody_down(num_sessions: int) -> None:
    load = Load(SpeculationTrials(64), num_sessions, tokens_per_round=1.2, step_s_of_all=2 * FORWARD_S).run(1000)
    assert load.speculating() == 0
    assert load.speedup > 0.97


@pytest.mark.parametrize("num_sessions", [1, 2, 4, 16, 64])
def test_drafts_that_pay_are_had_nearly_all_the_time(num_sessions: int) -> None:
    load = Load(SpeculationTrials(64), num_sessions, tokens_per_round=3.0, step_s_of_all=1.5 * FORWARD_S).run(1000)
    assert load.speculating() == num_sessions
    assert load.speedup > 0.95 * 2.0


def test_a_few_try_first() -> None:
    load = Load(SpeculationTrials(64), 16, tokens_per_round=1.2, step_s_of_all=2 * FORWARD_S)
    seen = {load.run(1).speculating() for _ in range(200)}
    assert seen == {0, 4}


def test_what_failed_is_tried_again_ever_more_rarely() -> None:
    load = Load(SpeculationTrials(64), 8, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S)
    trials_of = [sum(load.run(1).speculating() > 0 for _ in range(2 * MAX_REST_STEPS)) for _ in range(3)]
    assert trials_of[0] > trials_of[2] > 0


def test_drafts_that_become_worth_it_are_found() -> None:
    load = Load(SpeculationTrials(64), 8, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(300)
    load.tokens_per_round, load.step_s_of_all = 3.0, FORWARD_S
    load.run(1000)
    assert load.speculating() == 8


def test_a_lone_session_that_gained_nothing_stops_and_the_next_one_tries_for_itself() -> None:
    load = Load(SpeculationTrials(64), 1, tokens_per_round=1.1, step_s_of_all=1.6 * FORWARD_S).run(120)
    assert load.speculating() == 0
    load.session, load.tokens_per_round = "t", 3.0
    for _ in range(100):
        assert load.run(1).speculating() == 1


def test_no_mix_of_drafters_pays_for_what_another_did() -> None:
    trials = SpeculationTrials(64)
    Load(trials, 8, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(100)
    other = Load(trials, 8, tokens_per_round=2.0, step_s_of_all=FORWARD_S, mix="other").run(30)
    assert other.speculating() == 8


def test_a_small_load_does_not_pay_for_what_a_great_one_did_and_a_great_one_learns_from_a_small_one() -> None:
    trials = SpeculationTrials(64)
    assert Load(trials, 8, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(60).speculating() == 0
    assert Load(trials, 2, tokens_per_round=2.0, step_s_of_all=1.1 * FORWARD_S).run(60).speculating() == 2
    assert Load(trials, 16, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(30).speculating() == 0


def test_a_trial_begins_when_prompts_are_computed_and_is_judged_when_drafts_come() -> None:
    trials = SpeculationTrials(64)
    for _ in range(5):
        trials.observe_alone(MeasuredStep(8, 8, 8, FORWARD_S))
    assert trials.num_speculating(8, 8, MIX, None, has_prompts=True) == 0
    assert trials.num_speculating(8, 8, MIX, None) == 2
    for _ in range(MAX_SETTLING_STEPS - 1):  # drafters read, and slow everybody down
        trials.observe(MIX, MeasuredStep(8, 8, 8, 2 * FORWARD_S, 2), FORWARD_S)
        assert trials.num_speculating(8, 8, MIX, None) == 2
    for _ in range(10):
        trials.observe(MIX, MeasuredStep(8, 8, 16, 1.1 * FORWARD_S, 2, ("a", "b")), FORWARD_S)
    assert trials.num_speculating(8, 8, MIX, None) == 8


def test_steps_without_any_drafter_tell_what_steps_alone_take() -> None:
    trials = SpeculationTrials(64)
    for _ in range(5):
        trials.observe_alone(MeasuredStep(16, 16, 16, FORWARD_S))
    assert Load(trials, 16, tokens_per_round=2.0, step_s_of_all=FORWARD_S).speculating() > 0


def test_where_every_step_has_prompts_nothing_is_judged_and_everybody_speculates_in_the_end() -> None:
    load = Load(SpeculationTrials(64), 16, tokens_per_round=2.0, step_s_of_all=FORWARD_S)
    load.run(MAX_STEPS_UNTOLD + 1, has_prompts=True)
    assert load.speculating() > 0


def test_one_session_that_ends_sooner_than_fifteen_others_changes_nothing() -> None:
    trials = SpeculationTrials(64)
    Load(trials, 16, tokens_per_round=2.0, step_s_of_all=FORWARD_S).run(60)
    assert trials.num_speculating(15, 15, MIX, None) == 15
    assert trials.num_speculating(13, 13, MIX, None) == 13


def test_drafts_that_nobody_had_cannot_have_failed() -> None:
    load = Load(SpeculationTrials(64), 4, tokens_per_round=1.0, step_s_of_all=1.1 * FORWARD_S, drafts_come=False)
    for _ in range(200):
        load.run(1)
    assert load.speculating() == 4


def test_drafts_that_nobody_had_have_failed_where_steps_waited_for_them() -> None:
    """A drafter far away that has no guess says so late, and every step waits for that."""
    trials = SpeculationTrials(64)
    Load(trials, 1, tokens_per_round=1.0, step_s_of_all=FORWARD_S, drafts_come=False).run(100)
    num_asked = 0
    for _ in range(200):
        is_asked = trials.num_speculating(1, 1, MIX, "s") > 0
        num_asked += is_asked
        waited_s = FORWARD_S if is_asked else 0.0
        trials.observe(MIX, MeasuredStep(1, 1, 1, FORWARD_S + waited_s, is_asked, waited_s=waited_s), FORWARD_S)
    assert num_asked < 60


@pytest.mark.parametrize("num_steps_a_visit", [1, 2, 3, 6])
@pytest.mark.parametrize("loads", [(1, 2), (5, 6), (8, 16)])
def test_a_load_that_goes_to_and_fro_is_judged_too(loads: tuple[int, int], num_steps_a_visit: int) -> None:
    """Sessions that come and go: no load lasts long enough to settle, and neither may wait for that for good."""
    for tokens_per_round, step_s, is_had in ((3.0, 1.5 * FORWARD_S, True), (1.1, 2 * FORWARD_S, False)):
        trials = SpeculationTrials(64)
        both = [Load(trials, num, tokens_per_round, step_s) for num in loads]
        for _ in range(120):
            for load in both:
                load.run(num_steps_a_visit)
        if is_had:
            assert [load.speculating() for load in both] == list(loads)
        elif loads[0] > 1:  # a lone session tries again whenever it is alone
            assert [load.speculating() for load in both] == [0, 0]


def test_drafters_that_are_stuck_are_not_waited_for_in_every_visit_to_a_load_anew() -> None:
    trials = SpeculationTrials(64)
    loads = [Load(trials, num, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(30) for num in (16, 32)]
    asked: dict[int, list[int]] = {16: [], 32: []}
    for visit in range(400):
        num = loads[visit % 2].num_sessions
        for _ in range(3):
            num_asked = loads[visit % 2].speculating()
            step_s = FORWARD_S * (2 if num_asked else 1)
            trials.observe(MIX, MeasuredStep(num, num, num, step_s, num_asked, range(min(1, num_asked))), FORWARD_S)
            asked[num].append(num_asked)
    for counts in asked.values():
        first = next(index for index, num_asked in enumerate(counts) if num_asked)
        assert 0 in counts[first : first + 40]


def test_a_process_that_stalls_ends_nothing() -> None:
    trials = SpeculationTrials(64)
    load = Load(trials, 64, tokens_per_round=1.5, step_s_of_all=FORWARD_S).run(100)
    for _ in range(20):
        stall = MeasuredStep(64, 64, 96, 30 * FORWARD_S, 64, range(64))
        trials.observe(MIX, stall, FORWARD_S)
        assert load.run(8).speculating() == 64


def test_what_is_judged_anew_begins_with_steps_that_say_nothing() -> None:
    """Back from another load, drafters must catch up first; a mean of what they do meanwhile would end drafts."""
    trials = SpeculationTrials(64)
    load = Load(trials, 16, tokens_per_round=2.0, step_s_of_all=FORWARD_S).run(60)
    Load(trials, 2, tokens_per_round=2.0, step_s_of_all=FORWARD_S).run(30)
    for _ in range(MAX_SETTLING_STEPS - 1):
        trials.observe(MIX, MeasuredStep(16, 16, 16, 2 * FORWARD_S, 16, range(3)), FORWARD_S)
    assert load.speculating() == 16


def test_a_lone_session_is_not_condemned_for_another_ones_drafts() -> None:
    load = Load(SpeculationTrials(64), 1, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(60)
    assert load.speculating() == 0
    load.session = "t"
    for _ in range(2):
        assert load.run(1).speculating() == 1


def test_before_drafts_fail_what_steps_take_without_them_is_measured_anew() -> None:
    """A context that has grown makes all steps slower, and drafts look bad beside steps of long ago."""
    load = Load(SpeculationTrials(64), 1, tokens_per_round=2.0, step_s_of_all=1.4 * FORWARD_S).run(600)
    load.slowdown = 1.5
    num_without = sum(load.run(1).speculating() == 0 for _ in range(600))
    assert load.speculating() == 1
    assert num_without < 20


def test_drafts_that_begin_a_little_badly_and_then_pay_are_kept() -> None:
    load = Load(SpeculationTrials(64), 4, tokens_per_round=1.0, step_s_of_all=1.04 * FORWARD_S).run(7 + 14)
    load.tokens_per_round = 1.5
    for _ in range(200):
        assert load.run(1).speculating() == 4


def test_a_rest_ends_where_every_step_has_prompts() -> None:
    load = Load(SpeculationTrials(64), 16, tokens_per_round=1.0, step_s_of_all=2 * FORWARD_S).run(60)
    assert load.speculating() == 0
    load.run(FIRST_REST_STEPS + MAX_STEPS_UNTOLD, has_prompts=True)
    assert load.speculating() > 0


def test_a_clock_that_stands_still_tells_nothing() -> None:
    trials = SpeculationTrials(64)
    for _ in range(100):
        trials.observe(MIX, MeasuredStep(1, 1, 1, 0.0), 0.0)
    assert trials.num_speculating(1, 1, MIX, "s") == 1
