"""Tells every session how long its drafts may be now: what was measured, put together before each step.

Knows sessions, forward times and gains; refuses to know how budgets reach a drafter.
"""

from collections.abc import Collection, Sequence

import numpy as np

from verifier_service.attachment import AttachmentKey, DraftModel
from verifier_service.budgets import Counts, share_rows
from verifier_service.expected_gains import ExpectedGains
from verifier_service.forward_times import ForwardTimes
from verifier_service.scheduler import SchedulerPolicy, SessionRows
from verifier_service.session import VerifierSession
from verifier_service.speculation_trials import MeasuredStep, SpeculationTrials


class FlowControl:
    """Sets `draft_budget` of the running sessions. Sessions that wait for blocks have none."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._times = ForwardTimes()
        self._gains = ExpectedGains(policy.max_draft_tokens)
        self._trials = SpeculationTrials(policy.max_step_rows)
        self._num_sessions = 0
        self.num_speculating = 0
        """Sessions that may draft now."""
        self._mix: frozenset[DraftModel] = frozenset()

    def assign(self, sessions: Collection[VerifierSession]) -> None:
        """Shares the draft rows of the next steps among the running sessions that have a drafter."""
        drafted = [session for session in sessions if session.attachment is not None]
        self._num_sessions, self.num_speculating = len(sessions), 0
        self._mix = frozenset(session.attachment.draft_model for session in drafted if session.attachment is not None)
        if not drafted or self._policy.max_draft_tokens == 0:
            return
        if len(sessions) == 1 and (attachment := drafted[0].attachment) is not None:
            attachment.vain_drafts.forget()  # its rounds wait as they like
        num_uncached = sum(session.num_uncached - 1 for session in sessions)
        num_prompt_rows = min(num_uncached, self._policy.num_rows_for_prompts())
        limits = np.array([self._limit(session) for session in drafted])
        if not self._times.is_known:
            share = (self._policy.max_step_rows - num_prompt_rows) // len(sessions) - 1
            budgets = np.minimum(limits, max(0, share))
        else:
            if self._policy.judges_drafts:
                self._hold_back(drafted, limits, has_prompts=num_uncached > 0)
            budgets = share_rows(
                self._gains.of([self._slot(session) for session in drafted]),
                limits,
                np.array([session.draft_budget for session in drafted]),
                num_rounds=len(sessions),
                num_other_rows=len(sessions) + num_prompt_rows,
                forward_s=self._times.table(self._policy.max_step_rows),
            )
        for session, budget in zip(drafted, budgets.tolist(), strict=True):
            session.draft_budget = budget
            session.tally.had_budget |= budget > 0
        self.num_speculating = int(np.count_nonzero(budgets))

    def _hold_back(self, drafted: Sequence[VerifierSession], limits: Counts, *, has_prompts: bool) -> None:
        """Takes their limit from sessions that may not draft for now. Those may that were admitted first."""
        num_speculating = self._trials.num_speculating(
            self._num_sessions,
            len(drafted),
            self._mix,
            lone_session=drafted[0].attachment and drafted[0].attachment.key,
            has_prompts=has_prompts,
        )
        held_back = np.flatnonzero(limits)[num_speculating:]
        limits[held_back] = 0
        for index in held_back.tolist():
            drafted[index].tally.was_held_back = True

    def expected_forward_s(self, sessions: Collection[VerifierSession]) -> float:
        """Time of a forward that takes all of these along, drafts left out; 0 before any was measured."""
        return self._times.expected_s(min(self._policy.max_step_rows, sum(each.num_uncached for each in sessions)))

    def observe_forward(self, num_rows: int, forward_s: float) -> None:
        """A forward over so many rows took this long."""
        self._times.observe(num_rows, forward_s)

    def observe_step(
        self,
        planned: Sequence[SessionRows],
        num_tokens: int,
        drafters: Collection[AttachmentKey],
        elapsed_s: float,
        waited_s: float,
    ) -> None:
        """A step decided so many tokens. Time, and drafters whose drafts came, count from the step before."""
        if not self._times.is_known or not self._policy.judges_drafts or self._policy.max_draft_tokens == 0:
            return
        step = MeasuredStep(
            num_sessions=self._num_sessions,
            num_rounds=len(planned),
            num_tokens=num_tokens,
            elapsed_s=elapsed_s,
            num_asked=self.num_speculating,
            drafters=drafters,
            has_prompts=any(not rows.is_round or rows.num_prefill > 1 for rows in planned),
            waited_s=waited_s,
        )
        if self._mix:
            num_rows = min(self._num_sessions, self._policy.max_step_rows)
            self._trials.observe(self._mix, step, self._times.expected_s(num_rows))
        else:
            self._trials.observe_alone(step)

    def observe_rounds(self, rounds: Sequence[tuple[SessionRows, int]]) -> None:
        """Rounds with how far down their draft was accepted."""
        for planned, _ in rounds:
            _observe_use(planned)
        judged = [(planned, accepted) for planned, accepted in rounds if planned.session.gains_slot is not None]
        if judged:
            self._gains.observe(
                [self._slot(planned.session) for planned, _ in judged],
                [planned.draft_depth for planned, _ in judged],
                [accepted for _, accepted in judged],
            )

    def forget(self, session: VerifierSession) -> None:
        """The session is over."""
        if session.gains_slot is not None:
            self._gains.remove(session.gains_slot)
            session.gains_slot = None

    def _slot(self, session: VerifierSession) -> int:
        if session.gains_slot is None:
            session.gains_slot = self._gains.add()
        return session.gains_slot

    def _limit(self, session: VerifierSession) -> int:
        """What its request, its output limit and the policy leave of a draft; nothing where drafts are of no use."""
        if session.attachment is not None and session.attachment.vain_drafts.is_resting:
            return 0
        wanted = session.spec.speculation.max_draft_tokens
        limit = self._policy.max_draft_tokens if wanted is None else min(wanted, self._policy.max_draft_tokens)
        return max(0, min(limit, session.num_tokens_left - 1))


def _observe_use(planned: SessionRows) -> None:
    session = planned.session
    if session.attachment is None:
        return
    if planned.draft.token_ids:
        session.attachment.vain_drafts.observe_draft()
    elif planned.answers is None:  # an empty draft came in time, and cost nothing
        has_begun = session.attachment.last_sequence > 0  # a drafter may have a long prompt to read first
        was_asked = session.draft_budget > 0 and has_begun and not planned.gave_up
        session.attachment.vain_drafts.observe_round_alone(was_asked=was_asked)
