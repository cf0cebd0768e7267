"""How long the next draft should be: the length with the most expected tokens per second. Pure: no clock, no model.

A draft of K tokens is expected to bring `1 + sum of reach probabilities` tokens in the time of K model steps and of a
verify pass over K + 1 rows.
Three questions are answered with that ratio:

- before drafting, how many model steps may be spent (acceptance measured per place), and how unlikely a token may be
  to be still worth a step;
- after drafting, how many of the guesses are worth a row of the verifier (the proposer's own estimates);
- whether model steps pay at all. Off and on are held apart by a margin, and while off a short probe is sent so rarely
  that all probes together cost about one percent.

Source of the objective: Leviathan et al. 2023 (arXiv:2211.17192), section 3.5, with a verify time that depends on rows.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from drafter_service.proposers.base import DraftLimits
from drafter_service.verify_times import VerifyTimes

FIRST_DRAFT_TOKENS = 4
FIRST_MIN_GAIN = 1.0
OFF_BELOW_SPEEDUP = 0.98
ON_ABOVE_SPEEDUP = 1.05
NUM_DRAFTS_BEFORE_OFF = 5
FIRST_PROBE_AFTER = 6
PROBE_TOKENS = 3
PROBE_COST_SHARE = 0.01
MIN_PROBE_INTERVAL = 16
MAX_PROBE_BACKOFF = 4


class ModelDrafts:
    """What all sessions of a drafter learn together of its model: seconds of one step, how often a guess is right.

    The first steps may run while the verifier reads a prompt on the same cores, and then take several times what they
    do later: of those the quick ones are believed sooner, and until they are over nobody gives up for slowness.
    """

    GAIN = 0.1
    NUM_FIRST_TIMES, FIRST_GAIN_IF_QUICKER = 6, 0.5
    MAX_SURPRISE = 3.0
    STEPS_PER_READ_TOKEN = 0.25
    """Tokens that are taken in at once share what it costs to read the weights."""
    ACCEPTANCE_GAIN = 0.02

    def __init__(self) -> None:
        self.step_s = 0.0
        self.num_timed = 0
        self.acceptance = 0.75
        self.num_judged = 0

    def observe_time(self, num_steps: int, num_read_tokens: int, elapsed_s: float) -> None:
        """A draft of this many steps took this long; before the first, the model took in tokens that were committed."""
        step_s = elapsed_s / (num_steps + self.STEPS_PER_READ_TOKEN * num_read_tokens)
        self.num_timed += 1
        if self.step_s == 0.0:
            self.step_s = step_s
        else:
            is_early = self.num_timed <= self.NUM_FIRST_TIMES
            gain = self.FIRST_GAIN_IF_QUICKER if is_early and step_s < self.step_s else self.GAIN
            self.step_s += gain * (min(step_s, self.MAX_SURPRISE * self.step_s) - self.step_s)

    @property
    def is_known(self) -> bool:
        """Whether there is enough to give up."""
        return self.num_judged >= NUM_DRAFTS_BEFORE_OFF and self.num_timed >= self.NUM_FIRST_TIMES

    def observe_acceptance(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A draft was judged up to its first wrong token."""
        for place in range(min(num_draft_tokens, num_accepted_tokens + 1)):
            self.acceptance += self.ACCEPTANCE_GAIN * ((place < num_accepted_tokens) - self.acceptance)
        self.num_judged += 1


class AcceptancePerPosition:
    """Probability that a model's guess at a place is right in one session, given that all before it were."""

    PRIOR_WEIGHT, POOLED_WEIGHT, MEMORY = 4.0, 4.0, 24.0

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._keep = 1.0 - 1.0 / self.MEMORY
        self._num_right: list[float] = []
        self._num_judged: list[float] = []

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A draft was judged up to its first wrong token."""
        for place in range(min(num_draft_tokens, num_accepted_tokens + 1)):
            if place == len(self._num_right):
                self._num_right.append(0.0)
                self._num_judged.append(0.0)
            self._num_right[place] = self._num_right[place] * self._keep + (place < num_accepted_tokens)
            self._num_judged[place] = self._num_judged[place] * self._keep + 1.0

    def reach_probs(self, num_tokens: int) -> list[float]:
        """For each place the probability that it is reached and right."""
        pooled = (sum(self._num_right) + self._prior * self.PRIOR_WEIGHT) / (sum(self._num_judged) + self.PRIOR_WEIGHT)
        acceptance = [
            (right + pooled * self.POOLED_WEIGHT) / (judged + self.POOLED_WEIGHT)
            for right, judged in zip(self._num_right, self._num_judged, strict=True)
        ]
        acceptance += [pooled] * (num_tokens - len(acceptance))
        return list(itertools.accumulate(acceptance[:num_tokens], lambda reach, accept: reach * accept))


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """What the proposer may do next. `max_tokens` 0: send an empty draft."""

    max_tokens: int
    limits: DraftLimits


class DraftLengthPolicy:
    """One session's choice of draft lengths.

    Args:
        verify_times: of the session's verifier, shared with other sessions there.
        model_drafts: of the drafter's model, shared.
        max_tokens: the drafter's and the request's own limit.
    """

    def __init__(self, verify_times: VerifyTimes, model_drafts: ModelDrafts, max_tokens: int) -> None:
        self._verify_times = verify_times
        self._model_drafts = model_drafts
        self._max_tokens = max_tokens
        self._acceptance = AcceptancePerPosition(model_drafts.acceptance)
        self._num_judged = 0
        self._is_on = True
        self._num_rounds_off = 0
        self._probe_backoff = 1
        self._probe_at = MIN_PROBE_INTERVAL
        self._is_probing = False
        self._max_timely_tokens = max_tokens

    @property
    def is_on(self) -> bool:
        """Whether model steps pay."""
        return self._is_on

    def plan(self, draft_budget: int) -> DraftPlan:
        """The next draft's limits. Called once for each draft."""
        times = self._verify_times
        max_tokens = min(draft_budget, self._max_tokens)
        if times.max_tried_rows == 0:
            max_tokens = min(max_tokens, FIRST_DRAFT_TOKENS)
            return DraftPlan(max_tokens, DraftLimits(max_model_tokens=max_tokens, min_tokens_gained=FIRST_MIN_GAIN))
        if not times.was_tried(1):
            return DraftPlan(0, DraftLimits(max_model_tokens=0))  # what the verifier takes alone is the yardstick
        max_tokens = min(max_tokens, max(FIRST_DRAFT_TOKENS, 2 * times.max_tried_rows))
        if max_tokens == 0:
            return DraftPlan(0, DraftLimits(max_model_tokens=0))
        num_steps, rate = self._best_model_draft(min(max_tokens, self._max_timely_tokens))
        self._switch(rate * times.expected_s(1))
        if not self._is_on:
            return DraftPlan(max_tokens, DraftLimits(max_model_tokens=self._probe_tokens(max_tokens)))
        row_s = (times.expected_s(1 + num_steps) - times.expected_s(1)) / num_steps
        limits = DraftLimits(
            max_model_tokens=num_steps,
            min_reach_prob=min(1.0, rate * (self._model_drafts.step_s + row_s)),
            min_tokens_gained=max(0.0, rate * times.expected_s(1 + num_steps) - 1.0),
        )
        return DraftPlan(max_tokens, limits)

    def num_tokens_worth_sending(self, reach_probs: Sequence[float], draft_time_s: float) -> int:
        """How many first tokens of a finished guess give the most tokens per second; 0 where a row costs too much."""
        times = self._verify_times
        if times.max_tried_rows == 0:
            return len(reach_probs)
        gained = itertools.accumulate(reach_probs, initial=1.0)
        rates = [tokens / (draft_time_s + times.expected_s(1 + n)) for n, tokens in enumerate(gained)]
        return rates.index(max(rates))

    def observe_model_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A draft that cost model steps was judged."""
        self._num_judged += 1
        self._model_drafts.observe_acceptance(num_draft_tokens, num_accepted_tokens)
        self._acceptance.observe(num_draft_tokens, num_accepted_tokens)
        if self._max_timely_tokens < self._max_tokens:
            self._max_timely_tokens += 1
        if self._is_probing:
            self._is_probing = False
            right = num_accepted_tokens == num_draft_tokens
            self._probe_backoff = 1 if right else min(2 * self._probe_backoff, MAX_PROBE_BACKOFF)
            self._probe_at = 1 if right else self._probe_interval() * self._probe_backoff

    def observe_late_draft(self, num_draft_tokens: int) -> None:
        """The verifier had gone on before a draft that cost model steps came: the next ones must be shorter."""
        self._max_timely_tokens = max(1, num_draft_tokens // 2)
        self._is_probing = False

    def _best_model_draft(self, max_tokens: int) -> tuple[int, float]:
        """The best number of model steps, at least 1, and its expected tokens per second."""
        gained = itertools.accumulate(self._acceptance.reach_probs(max_tokens), initial=1.0)
        step_s = self._model_drafts.step_s
        rates = [tokens / (n * step_s + self._verify_times.expected_s(1 + n)) for n, tokens in enumerate(gained)]
        num_steps = max(range(1, max_tokens + 1), key=rates.__getitem__)
        return num_steps, rates[num_steps]

    def _switch(self, expected_speedup: float) -> None:
        if self._is_on:
            if expected_speedup < OFF_BELOW_SPEEDUP and self._model_drafts.is_known:
                self._is_on, self._num_rounds_off, self._probe_backoff = False, 0, 1
                # Off by what other sessions met alone: this one is looked at soon.
                self._probe_at = self._probe_interval() if self._num_judged else FIRST_PROBE_AFTER
        elif expected_speedup > ON_ABOVE_SPEEDUP:
            self._is_on = True

    def _probe_tokens(self, max_tokens: int) -> int:
        self._num_rounds_off += 1
        if self._num_rounds_off < self._probe_at:
            return 0
        self._num_rounds_off = 0
        self._is_probing = True
        return min(PROBE_TOKENS, max_tokens)

    def _probe_interval(self) -> int:
        """Rounds between probes such that their cost, nothing accepted, is a small share of all time."""
        alone_s = self._verify_times.expected_s(1)
        cost_s = PROBE_TOKENS * self._model_drafts.step_s + self._verify_times.expected_s(1 + PROBE_TOKENS) - alone_s
        return max(MIN_PROBE_INTERVAL, math.ceil(cost_s / (PROBE_COST_SHARE * alone_s)))
