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
SETTLING_STEPS_ALONE, SETTLING_STEPS_WITH_DRAFTS = 2, 4
"""First steps of a phase, which say nothing of it: drafts of the phase before, and none yet of this one."""
MEASURED_STEPS_ALONE = 5
MAX_STEPS_ALONE = 64
"""Of which some had to be measured; where none could, since all computed prompts too, drafts are not judged."""
MIN_MEASURED_STEPS, MIN_MEASURED_ROUNDS = 6, 24
"""Of a verdict in time of peace. What is a disaster is ended sooner."""
MIN_STEPS_OF_A_DISASTER = 3
DOUBT = 1.5
"""In standard errors, taking a round's tokens to vary as much as their mean."""
GOOD_SPEEDUP, BAD_SPEEDUP = 1.02, 0.99
CLEAR_SPEEDUP = 1.5
"""So great a gain over forwards that ran beside drafters is one over any."""
KEEP_PER_VERDICT = 0.5
"""What is left of older evidence after a verdict, and where a lone session follows another."""
FIRST_REST_STEPS, MAX_REST_STEPS = 48, 1536
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
    theirs, `num_tokens` in all. One with prompts tells nothing of drafts.
    """

    num_sessions: int
    num_rounds: int
    num_tokens: int
    elapsed_s: float
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
        self._records: collections.OrderedDict[Hashable, _Record] = collections.OrderedDict()

    def num_speculating(self, num_sessions: int, num_drafted: int, mix: Hashable, lone_session: Hashable) -> int:
        """How many of the sessions that have a drafter may have a budget in the next step.

        Args:
            num_sessions: that are running.
            num_drafted: those of them that have a drafter.
            mix: what their drafters are, as far as that decides what drafts cost.
            lone_session: which one it is, where it is one.
        """
        record = self._record(num_sessions, mix)
        if num_sessions == 1 and record.lone_session != lone_session:
            # One session's drafts say little of another's; of sixteen they say much of the next sixteen.
            record.lone_session = lone_session
            if record.phase is not _Phase.ALONE:
                record.phase, record.num_steps = _Phase.ALL, 0
                record.fade()
        match record.phase:
            case _Phase.ALL:
                return num_drafted
            case _Phase.FEW:
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
        record.num_steps += 1
        record.num_steps_since_alone += 1
        match record.phase:
            case _Phase.ALONE | _Phase.REST:
                self._observe_without_drafts(record, step)
            case _ if step.tells and record.num_steps > SETTLING_STEPS_WITH_DRAFTS:
                self._observe_with_drafts(record, step, expected_forward_s)

    def _observe_without_drafts(self, record: _Record, step: MeasuredStep) -> None:
        if step.tells and record.num_steps > SETTLING_STEPS_ALONE:
            self._measure_alone(step)
            record.num_measured_steps += 1
        is_rest = record.phase is _Phase.REST
        if record.num_steps >= (record.rest_steps if is_rest else MAX_STEPS_ALONE):
            record.enter(_first_trial(step.num_sessions))
        elif not is_rest and record.num_measured_steps >= MEASURED_STEPS_ALONE:
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
            # A lone session's gain is mostly so great that nothing need be known.
            known = num_sessions == 1 or self._is_known_alone(num_sessions)
            record = self._records[key] = _Record(_first_trial(num_sessions) if known else _Phase.ALONE)
            if len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return record

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
