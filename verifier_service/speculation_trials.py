"""How many sessions may speculate now: all, a few or none, by what was measured with drafts and without.

The time of rows is one cost of drafts, and known (`budgets`). Others show only where they are paid: rounds that wait,
drafters that compute on the very cores or the bandwidth of the verifier, drafts that come too late. So both ways are
tried, and the one that decides more tokens a second stays. Trials begin with a few sessions, and what fails is tried
again after rests that double: all trials together cost next to nothing. What holds for one load says little of
another, so each number of sessions, up to a factor of two, and each mix of draft models has a record of its own.
Pure: times are arguments.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Hashable

from verifier_service.forward_times import ForwardTimes

FEW_SHARE = 4
"""A trial begins with one session in so many."""
SETTLING_STEPS_ALONE = 2
"""Drafters may still be busy with what nobody wants any more."""
MAX_SETTLING_STEPS = 8
"""Steps with drafters are judged from the first draft on, or after so many: one may have much to read first."""
MEASURED_STEPS_ALONE = 5
MAX_STEPS_UNTOLD = 64
"""Where so many steps told nothing, for all computed prompts too, drafts are had without a judgement."""
MIN_MEASURED_STEPS, MIN_MEASURED_ROUNDS = 6, 24
"""Of a verdict in time of peace. What is a disaster is ended sooner."""
MIN_STEPS_OF_A_DISASTER = 3
DOUBT = 0.7
"""Of a round's tokens, as a share of their mean: what a disaster must exceed by far."""
GOOD_SPEEDUP, BAD_SPEEDUP = 1.02, 0.99
CLEAR_SPEEDUP = 1.5
"""So great a gain over forwards that ran beside drafters is one over any."""
KEEP_PER_VERDICT = 0.5
"""What is left of older evidence after a verdict, and where a lone session follows another."""
FIRST_REST_STEPS, MAX_REST_STEPS = 96, 1536
STEPS_UNTIL_ALONE_AGAIN = 2048
"""After so many, steps without drafts are measured anew, where the gain leaves room for doubt."""
KNOWN_WITHIN = 1.5
"""What was measured for some number of sessions holds for others within this factor."""
MAX_RECORDS = 64


class _Phase(enum.Enum):
    ALONE = enum.auto()
    """Nobody speculates, and what steps take is measured."""
    FEW = enum.auto()
    ALL = enum.auto()
    REST = enum.auto()


@dataclasses.dataclass
class _Record:
    """What is known for one kind of load. `alone_s` is the time that the decided tokens would have taken alone."""

    phase: _Phase
    num_steps: int = 0
    num_untold_steps: int = 0
    has_settled: bool = False
    num_measured_steps: int = 0
    num_measured_rounds: int = 0
    alone_s: float = 0.0
    elapsed_s: float = 0.0
    rest_steps: int = 0
    num_steps_since_alone: int = 0
    lone_session: Hashable = None

    def enter(self, phase: _Phase) -> None:
        """A phase begins, and evidence with it."""
        self.phase, self.num_steps = phase, 0
        self.num_untold_steps, self.has_settled = 0, False
        self.fade(0.0)

    def fade(self, keep: float = KEEP_PER_VERDICT) -> None:
        """Older evidence counts for less."""
        self.alone_s *= keep
        self.elapsed_s *= keep
        self.num_measured_steps = int(keep * self.num_measured_steps)
        self.num_measured_rounds = int(keep * self.num_measured_rounds)

    @property
    def speedup(self) -> float:
        return self.alone_s / self.elapsed_s if self.elapsed_s > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step that ran. `elapsed_s` counts from the end of the step before, waits included.

    `num_sessions` would all have a token if nobody had drafts, as far as a step has rows for them; `num_rounds` had
    theirs, `num_tokens` in all. `num_drafts` came meanwhile, of use or not. One with prompts tells nothing of drafts.
    """

    num_sessions: int
    num_rounds: int
    num_tokens: int
    elapsed_s: float
    num_drafts: int = 0
    has_prompts: bool = False

    @property
    def tells(self) -> bool:
        return self.elapsed_s > 0 and not self.has_prompts


class SpeculationTrials:
    """Told of every step, asked before each. `max_step_rows` of the engine's steps."""

    def __init__(self, max_step_rows: int) -> None:
        self._max_step_rows = max_step_rows
        self._alone = ForwardTimes()
        self._measured_alone: set[int] = set()
        self._records: collections.OrderedDict[tuple[int, Hashable], _Record] = collections.OrderedDict()

    def num_speculating(
        self, num_sessions: int, num_drafted: int, mix: Hashable, lone_session: Hashable, *, has_prompts: bool = False
    ) -> int:
        """How many of the sessions that have a drafter may have a budget in the next step.

        Args:
            num_sessions: that are running.
            num_drafted: those of them that have a drafter.
            mix: what their drafters are, as far as that decides what drafts cost.
            lone_session: which one it is, where it is one.
            has_prompts: whether the next step computes prompts, and so will tell nothing.
        """
        record = self._record(num_sessions, mix)
        if num_sessions == 1 and record.lone_session != lone_session:
            # One session's drafts say little of another's; of sixteen they say much of the next sixteen.
            record.lone_session = lone_session
            if record.phase is not _Phase.ALONE:
                record.phase, record.num_steps, record.has_settled = _Phase.ALL, 0, False
                record.fade()
        match record.phase:
            case _Phase.ALL:
                return num_drafted
            case _Phase.FEW if record.num_steps > 0 or not has_prompts:
                return math.ceil(num_drafted / FEW_SHARE)
            case _:
                return 0

    def observe_alone(self, step: MeasuredStep) -> None:
        """A step in which nobody has a drafter."""
        if step.tells:
            self._measure_alone(step)

    def observe(self, mix: Hashable, step: MeasuredStep, expected_forward_s: float) -> None:
        """A step in which somebody has a drafter.

        Args:
            mix: as it was when the step was planned.
            step: what it was.
            expected_forward_s: of a forward over a row of each session, as forwards are, beside drafters or not.
        """
        record = self._record(step.num_sessions, mix)
        record.num_steps_since_alone += 1
        if not step.tells and record.phase in (_Phase.ALONE, _Phase.FEW):
            record.num_untold_steps += 1
            if record.num_untold_steps == MAX_STEPS_UNTOLD:
                record.enter(_Phase.ALL)
            return
        record.num_steps += 1
        if record.phase in (_Phase.ALONE, _Phase.REST):
            self._observe_without_drafts(record, step)
        elif step.tells:
            record.has_settled |= step.num_drafts > 0 or record.num_steps >= MAX_SETTLING_STEPS
            if record.has_settled:
                self._observe_with_drafts(record, step, expected_forward_s)

    def _observe_without_drafts(self, record: _Record, step: MeasuredStep) -> None:
        if step.tells and record.num_steps > SETTLING_STEPS_ALONE:
            self._measure_alone(step)
            record.num_measured_steps += 1
        if record.phase is _Phase.REST:
            if record.num_steps >= record.rest_steps:
                record.enter(_first_trial(step.num_sessions))
        elif record.num_measured_steps >= MEASURED_STEPS_ALONE:
            record.num_steps_since_alone = 0
            record.enter(_first_trial(step.num_sessions))

    def _observe_with_drafts(self, record: _Record, step: MeasuredStep, expected_forward_s: float) -> None:
        is_known = self._is_known_alone(step.num_sessions)
        num_alone = min(step.num_sessions, self._max_step_rows)
        alone_s = self._alone.expected_s(num_alone) if is_known else expected_forward_s
        record.num_measured_steps += 1
        record.num_measured_rounds += step.num_rounds
        record.alone_s += alone_s * step.num_tokens / num_alone
        record.elapsed_s += step.elapsed_s
        if not self._is_decided(record):
            return
        is_doubtful = not is_known or record.num_steps_since_alone >= STEPS_UNTIL_ALONE_AGAIN
        if is_doubtful and record.speedup < CLEAR_SPEEDUP:
            record.enter(_Phase.ALONE)
        elif record.speedup < BAD_SPEEDUP:
            record.phase, record.num_steps = _Phase.REST, 0
            record.rest_steps = min(max(2 * record.rest_steps, FIRST_REST_STEPS), MAX_REST_STEPS)
        elif record.phase is _Phase.FEW:
            record.enter(_Phase.ALL)
        else:
            if record.speedup > GOOD_SPEEDUP:
                record.rest_steps = 0
            record.fade()

    def _is_decided(self, record: _Record) -> bool:
        if record.num_measured_steps >= MIN_MEASURED_STEPS and record.num_measured_rounds >= MIN_MEASURED_ROUNDS:
            return True
        if record.num_measured_steps < MIN_STEPS_OF_A_DISASTER:
            return False
        return record.speedup * (1 + DOUBT / math.sqrt(record.num_measured_rounds)) < BAD_SPEEDUP

    def _record(self, num_sessions: int, mix: Hashable) -> _Record:
        key = (num_sessions.bit_length(), mix)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._first_record(num_sessions, mix)
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return record

    def _first_record(self, num_sessions: int, mix: Hashable) -> _Record:
        """A trial; first steps alone where they are not known, but not for a lone session, whose gain is great; and a
        rest where drafts do not pay for fewer sessions: the more there are, the less a draft brings."""
        for (size, other_mix), record in self._records.items():
            if 1 < size < num_sessions.bit_length() and other_mix == mix and record.phase is _Phase.REST:
                return _Record(_Phase.REST, rest_steps=record.rest_steps)
        known = num_sessions == 1 or self._is_known_alone(num_sessions)
        return _Record(_first_trial(num_sessions) if known else _Phase.ALONE)

    def _measure_alone(self, step: MeasuredStep) -> None:
        if step.num_rounds == step.num_tokens > 0:
            self._measured_alone.add(step.num_rounds)
            self._alone.observe(step.num_rounds, step.elapsed_s)

    def _is_known_alone(self, num_sessions: int) -> bool:
        num_alone = min(num_sessions, self._max_step_rows)
        return any(
            num_alone <= KNOWN_WITHIN * measured and measured <= KNOWN_WITHIN * num_alone
            for measured in self._measured_alone
        )


def _first_trial(num_sessions: int) -> _Phase:
    return _Phase.FEW if num_sessions > 1 else _Phase.ALL
