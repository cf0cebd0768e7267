"""How many sessions may speculate now: all, a few or none, by what was measured with drafts and without.

The time of rows is one cost of drafts, and known (`budgets`). Others show only where they are paid: rounds that wait,
drafters that compute on the very cores or the bandwidth of the verifier, drafts that come too late. So both ways are
tried, and the one that decides more tokens a second stays. Trials of many begin with a few, and what fails is tried
again after rests that double: all trials together cost next to nothing. What holds for one load says little of
another, so each number of sessions, up to a factor of two, and each mix of draft models has a record of its own.
Pure: times are arguments.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Collection, Hashable

from verifier_service.forward_times import ForwardTimes

FEW_SHARE, MAX_SESSIONS_TRIED_AT_ONCE = 4, 5
"""A trial of more sessions than that begins with one in so many."""
SETTLING_STEPS_ALONE = 2
"""Drafters may still be busy with what nobody wants any more."""
MAX_SETTLING_STEPS = 8
"""Steps with drafters are judged once half of them drafted, or after so many: some may have much to read first."""
MAX_UNSETTLED_STEPS = 24
"""Of a phase. Where the load goes to and fro, and no visit is long enough to settle, what comes after these counts."""
MEASURED_STEPS_ALONE = 5
MAX_STEPS_UNTOLD = 64
"""Where so many steps of a phase told nothing, for they computed prompts too, drafts are had without a judgement."""
MIN_MEASURED_STEPS, MIN_MEASURED_ROUNDS = 6, 24
"""Of a verdict in time of peace. What is a disaster is ended sooner."""
MIN_STEPS_OF_A_DISASTER = 3
DOUBT = 0.7
"""Of a round's tokens, as a share of their mean: what a disaster must exceed by far."""
STALL = 4.0
"""A verdict must stand without its worst step, where that took more than so many steps alone: processes stall."""
MIN_WAITED_SHARE = 0.2
"""Where nobody drafted, waits of such a share of the time are what drafters cost all the same."""
GOOD_SPEEDUP, BAD_SPEEDUP = 1.02, 0.99
MILD_SPEEDUP, MAX_MILD_VERDICTS = 0.9, 3
"""Drafts that are hardly bad have so many verdicts more: both sides learn from the first ones what to wait for."""
CLEAR_SPEEDUP = 1.5
"""So great a gain over forwards that ran beside drafters is one over any."""
KEEP_PER_VERDICT = 0.5
"""What is left of older evidence after a verdict, and where a lone session follows another."""
FIRST_REST_STEPS, MAX_REST_STEPS = 256, 4096
MAX_AGE_TO_FAIL, MAX_AGE = 256, 2048
"""Steps until those without drafts are measured anew: before drafts are found to be bad, and otherwise."""
KNOWN_WITHIN = 1.5
"""What was measured for some number of sessions holds for others within this factor."""
MAX_RECORDS = 64

_Key = tuple[int, Hashable]


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
    rest_steps: int = 0
    num_steps: int = 0
    num_untold_steps: int = 0
    num_settling_steps: int = 0
    num_unsettled_steps: int = 0
    """Since the last verdict, in all visits to this load."""
    num_steps_alone: int = 0
    """Measured in this phase, likewise."""
    has_settled: bool = False
    drafters_seen: set[Hashable] = dataclasses.field(default_factory=set)
    num_measured_steps: int = 0
    num_measured_rounds: int = 0
    has_drafts: bool = False
    alone_s: float = 0.0
    elapsed_s: float = 0.0
    waited_s: float = 0.0
    judged_with_s: float = 0.0
    """What one step was taken to last alone, last."""
    stalled: tuple[float, float] = (0.0, 0.0)
    """The worst step that was a stall, its part of `alone_s` and of `elapsed_s`."""
    num_mild_verdicts: int = 0
    age: int = 0
    """Steps since some without drafts were measured."""
    lone_session: Hashable = None

    def enter(self, phase: _Phase, keep: float = 0.0) -> None:
        """A phase begins, and mostly evidence with it."""
        self.phase, self.num_steps, self.num_untold_steps, self.num_steps_alone = phase, 0, 0, 0
        self.unsettle()
        self.fade(keep)

    def rest(self) -> None:
        """Drafts failed. What speaks against them is kept for a lone session that comes next."""
        self.phase, self.num_steps, self.num_unsettled_steps, self.num_mild_verdicts = _Phase.REST, 0, 0, 0
        self.rest_steps = min(max(2 * self.rest_steps, FIRST_REST_STEPS), MAX_REST_STEPS)
        self.unsettle()

    def unsettle(self) -> None:
        """What comes first tells of what was before."""
        self.num_settling_steps, self.has_settled = 0, False
        self.drafters_seen.clear()

    def fade(self, keep: float = KEEP_PER_VERDICT) -> None:
        """Older evidence counts for less, and a new verdict needs steps of its own."""
        self.alone_s = keep * (self.alone_s - self.stalled[0])
        self.elapsed_s = keep * (self.elapsed_s - self.stalled[1])
        self.num_measured_steps = self.num_measured_rounds = self.num_unsettled_steps = 0
        self.has_drafts, self.waited_s, self.stalled = False, 0.0, (0.0, 0.0)

    def measure(self, alone_s: float, num_rounds: int, elapsed_s: float, *, is_stall: bool) -> None:
        """A step whose tokens would have taken `alone_s`."""
        self.num_measured_steps += 1
        self.num_measured_rounds += num_rounds
        self.alone_s += alone_s
        self.elapsed_s += elapsed_s
        if is_stall and elapsed_s > self.stalled[1]:
            self.stalled = (alone_s, elapsed_s)

    @property
    def speedup(self) -> float:
        elapsed_s = self.elapsed_s - self.stalled[1]
        return (self.alone_s - self.stalled[0]) / elapsed_s if elapsed_s > 0 else 1.0

    @property
    def is_decided(self) -> bool:
        """Whether there is enough for a verdict, or too much against drafts to go on."""
        if self.num_measured_steps >= MIN_MEASURED_STEPS and self.num_measured_rounds >= MIN_MEASURED_ROUNDS:
            return True
        if self.num_measured_steps < MIN_STEPS_OF_A_DISASTER:
            return False
        return self.speedup * (1 + DOUBT / math.sqrt(self.num_measured_rounds)) < BAD_SPEEDUP

    def has_another_try(self) -> bool:
        """Whether bad drafts may go on for one more verdict."""
        self.num_mild_verdicts += 1
        return self.speedup > MILD_SPEEDUP and self.num_mild_verdicts <= MAX_MILD_VERDICTS


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step that ran. `elapsed_s` counts from the end of the step before, `waited_s` of it before the step began.

    `num_sessions` would all have a token if nobody had drafts, as far as a step has rows for them; `num_rounds` had
    theirs, `num_tokens` in all. `num_asked` sessions had a budget, and drafts came from `drafters` meanwhile, of use or
    not. One with prompts tells nothing of drafts.
    """

    num_sessions: int
    num_rounds: int
    num_tokens: int
    elapsed_s: float
    num_asked: int = 0
    drafters: Collection[Hashable] = ()
    has_prompts: bool = False
    waited_s: float = 0.0

    @property
    def tells(self) -> bool:
        return self.elapsed_s > 0 and not self.has_prompts


class SpeculationTrials:
    """Told of every step, asked before each. `max_step_rows` of the engine's steps."""

    def __init__(self, max_step_rows: int) -> None:
        self._max_step_rows = max_step_rows
        self._alone = ForwardTimes()
        self._measured_alone: set[int] = set()
        self._records: collections.OrderedDict[_Key, _Record] = collections.OrderedDict()
        self._last_key: _Key | None = None

    def num_speculating(
        self, num_sessions: int, num_drafted: int, mix: Hashable, lone_session: Hashable, *, has_prompts: bool = False
    ) -> int:
        """How many of the sessions that have a drafter may have a budget in the next step.

        Args:
            num_sessions: that are running.
            num_drafted: those of them that have a drafter.
            mix: what their drafters are, as far as that decides what drafts cost.
            lone_session: names the session and its drafter, where it is the only one.
            has_prompts: whether the next step computes prompts, and so will tell nothing.
        """
        record = self._record(num_sessions, mix)
        if num_sessions == 1 and record.lone_session != lone_session:
            # One session's drafts say little of another's; of sixteen they say much of the next sixteen.
            record.lone_session = lone_session
            if record.phase is not _Phase.ALONE:
                record.phase, record.num_steps = _Phase.ALL, 0
                record.unsettle()
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
        self._last_key = None
        if step.tells:
            self._measure_alone(step)

    def observe(self, mix: Hashable, step: MeasuredStep, expected_forward_s: float) -> None:
        """A step in which somebody has a drafter.

        Args:
            mix: as it was when the step was planned.
            step: what it was.
            expected_forward_s: of a forward over a row of each session, as forwards are, beside drafters or not.
        """
        record, key = self._record(step.num_sessions, mix), _key(step.num_sessions, mix)
        if key != self._last_key:
            record.unsettle()
            self._last_key = key
        record.age += 1
        if not step.tells:
            record.num_untold_steps += 1
            if record.num_untold_steps >= MAX_STEPS_UNTOLD and record.phase in (_Phase.ALONE, _Phase.FEW):
                record.enter(_Phase.ALL)
            if record.phase is _Phase.REST:
                record.num_steps += 1
                self._end_rest(record, step.num_sessions)
            return
        record.num_steps += 1
        record.num_settling_steps += 1
        if record.phase in (_Phase.ALONE, _Phase.REST):
            self._observe_without_drafts(record, step)
        else:
            self._observe_with_drafts(record, step, expected_forward_s)

    def _observe_without_drafts(self, record: _Record, step: MeasuredStep) -> None:
        if record.num_settling_steps > SETTLING_STEPS_ALONE or record.num_unsettled_steps >= MAX_UNSETTLED_STEPS:
            self._measure_alone(step)
            record.num_steps_alone += 1
            record.age = 0
        elif record.phase is _Phase.ALONE:
            record.num_unsettled_steps += 1
        if record.phase is _Phase.REST:
            self._end_rest(record, step.num_sessions)
        elif record.num_steps_alone >= MEASURED_STEPS_ALONE:
            if record.elapsed_s > 0:  # what was in doubt
                record.alone_s *= self._alone.expected_s(self._num_alone(step.num_sessions)) / record.judged_with_s
            if record.speedup < BAD_SPEEDUP and not record.has_another_try():
                record.rest()
            else:
                record.enter(_first_trial(step.num_sessions))

    def _end_rest(self, record: _Record, num_sessions: int) -> None:
        if record.num_steps >= record.rest_steps:
            record.enter(_first_trial(num_sessions))

    def _observe_with_drafts(self, record: _Record, step: MeasuredStep, expected_forward_s: float) -> None:
        if not record.has_settled:
            record.drafters_seen.update(step.drafters)
            half = max(1, step.num_asked // 2)
            num_to_settle = min(MAX_SETTLING_STEPS, 1 + MAX_UNSETTLED_STEPS - record.num_unsettled_steps)
            record.has_settled = len(record.drafters_seen) >= half or record.num_settling_steps >= num_to_settle
            if not record.has_settled:
                record.num_unsettled_steps += 1
                return
        is_known = self._is_known_alone(step.num_sessions)
        num_alone = self._num_alone(step.num_sessions)
        step_alone_s = self._alone.expected_s(num_alone) if is_known else expected_forward_s
        alone_s = step_alone_s * step.num_tokens / num_alone
        record.judged_with_s = step_alone_s
        record.has_drafts |= len(step.drafters) > 0
        record.waited_s += min(step.waited_s, STALL * step_alone_s)
        record.measure(alone_s, step.num_rounds, step.elapsed_s, is_stall=step.elapsed_s > STALL * step_alone_s)
        if record.is_decided:
            self._judge(record, step.num_sessions, is_known=is_known)

    def _judge(self, record: _Record, num_sessions: int, *, is_known: bool) -> None:
        is_bad = record.speedup < BAD_SPEEDUP
        is_too_old = record.age >= (MAX_AGE_TO_FAIL if is_bad else MAX_AGE)
        if not record.has_drafts and record.waited_s < MIN_WAITED_SHARE * record.elapsed_s:
            record.fade(0.0)  # what nobody had cannot have failed, save where it was waited for
        elif (not is_known or is_too_old) and record.speedup < CLEAR_SPEEDUP:
            record.enter(_Phase.ALONE, keep=1.0)
        elif is_bad and not record.has_another_try():
            record.rest()
        elif record.phase is _Phase.FEW and not is_bad:
            record.enter(_Phase.ALL)
        else:
            if not is_bad:
                record.num_mild_verdicts = 0
            if record.speedup > GOOD_SPEEDUP:
                record.rest_steps = 0
            record.fade()

    def _record(self, num_sessions: int, mix: Hashable) -> _Record:
        key = _key(num_sessions, mix)
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
        size, _ = _key(num_sessions, mix)
        smaller = [other for other, other_mix in self._records if 0 < other < size and other_mix == mix]
        if smaller:
            nearest = self._records[max(smaller), mix]
            if nearest.phase is _Phase.REST:
                return _Record(_Phase.REST, rest_steps=nearest.rest_steps)
        known = num_sessions == 1 or self._is_known_alone(num_sessions)
        return _Record(_first_trial(num_sessions) if known else _Phase.ALONE)

    def _measure_alone(self, step: MeasuredStep) -> None:
        if step.num_rounds == step.num_tokens > 0:
            self._measured_alone.add(step.num_rounds)
            self._alone.observe(step.num_rounds, step.elapsed_s)

    def _num_alone(self, num_sessions: int) -> int:
        """Sessions that a step without drafts has rows for."""
        return min(num_sessions, self._max_step_rows)

    def _is_known_alone(self, num_sessions: int) -> bool:
        num_alone = self._num_alone(num_sessions)
        return any(
            num_alone <= KNOWN_WITHIN * measured and measured <= KNOWN_WITHIN * num_alone
            for measured in self._measured_alone
        )


def _key(num_sessions: int, mix: Hashable) -> _Key:
    """1, 2, 3 to 5, 6 to 11, 12 to 22, ...: the borders lie between powers of two, which are usual numbers of streams,
    so that one that ends a little sooner than the others changes nothing."""
    return ((2 * num_sessions * num_sessions).bit_length() - 1) // 2, mix


def _first_trial(num_sessions: int) -> _Phase:
    return _Phase.FEW if num_sessions > MAX_SESSIONS_TRIED_AT_ONCE else _Phase.ALL
