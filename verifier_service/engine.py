"""The verifier's engine: what is open, one forward at a time, and what each forward decides.

Commands come in between steps; `step` admits, schedules rows, runs one ragged forward and has its rounds decided. It
knows no gRPC, no threads and no wall clock: events leave through the sinks that came with the commands, time comes from
`clock`. One thread calls it.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.errors import (
    DrainingError,
    OverloadedError,
    SessionExistsError,
    SpecdecError,
    UnknownModelError,
)
from specdec.ids import SessionId
from specdec.messages import Draining, Fenced, Load, Opened, OpenSession, SessionFinished, Usage
from specdec.model.block_pool import BLOCK_SIZE, BlockLeakError
from specdec.model.interface import Runner
from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from specdec.params import FinishReason
from verifier_service.admission import Admission, EngineLimits
from verifier_service.drafters import Drafters
from verifier_service.fairness import TenantShares
from verifier_service.flow_control import FlowControl
from verifier_service.handover import Handover
from verifier_service.observer import EngineObserver
from verifier_service.room import Room
from verifier_service.rounds import Rounds, runner_rows
from verifier_service.scheduler import SchedulerPolicy, SessionRows, StepPlan, plan_step
from verifier_service.session import SessionSink, TargetLimits, VerifierSession, check_request

log = logging.getLogger(__name__)

IDLE_CHECK_INTERVAL_S = 10.0
"""The cache's books are checked no more often than this, and only where nothing is open and something was."""


class Engine:
    """Decides tokens for every open session."""

    def __init__(
        self,
        model_name: str,
        runner: Runner,
        tokenizer: TextTokenizer,
        policy: SchedulerPolicy,
        limits: EngineLimits,
        observer: EngineObserver,
        clock: Callable[[], float],
    ) -> None:
        self._model_name = model_name
        self._runner = runner
        self._tokenizer = tokenizer
        self._policy = policy
        self._limits = limits
        self._observer = observer
        self._clock = clock
        self._target = TargetLimits(
            vocabulary_size=runner.vocabulary_size,
            num_real_tokens=min(tokenizer.vocabulary_size, runner.vocabulary_size),
            context_limit=runner.context_limit,
            cache_limit=runner.pool.num_blocks * BLOCK_SIZE,
            end_token_ids=tokenizer.end_token_ids,
        )
        self._open: dict[SessionId, VerifierSession] = {}
        self.handover = Handover(limits.kept_tokens_grace_s, clock)
        self._shares = TenantShares()
        self._admission = Admission(runner.pool, self._shares, limits)
        self._flow = FlowControl(policy)
        self.drafters = Drafters(
            find_session=self._open.get,
            assign_budgets=self._assign_budgets,
            tokenizer_fingerprint=tokenizer.fingerprint,
            target=self._target,
            policy=policy,
            max_attachments_per_stream=limits.max_attachments_per_stream,
            observer=observer,
            clock=clock,
        )
        self._rounds = Rounds(self.drafters, observer, self._target.num_real_tokens, clock)
        self._room = Room(self._admission, self.drafters, observer, self._fail)
        self._num_arrivals = 0
        self._num_served = 0
        self._wait_until, self._wait_for_changes = 0.0, 0
        self._ready_since: float | None = None
        self._last_step_ended_at: float | None = None
        """None where nothing was to be done since."""
        self._draining = False
        self._checked_at = -IDLE_CHECK_INTERVAL_S
        self._is_checked = True
        self._observe_occupancy()

    def load(self) -> Load:
        """How busy the engine is. May be called from any thread: counts may be one step old."""
        return Load(
            num_active_sessions=len(self._admission.active),
            num_waiting_sessions=self._admission.num_waiting,
            kv_used_bytes=self._runner.pool.num_used_blocks * BLOCK_SIZE * self._runner.kv_bytes_per_token,
            kv_budget_bytes=self._runner.kv_budget_bytes,
            num_attachments=sum(session.attachment is not None for session in list(self._open.values())),
            max_waiting_sessions=self._admission.max_waiting,
            queue_wait_s=self._admission.queue_wait_s,
        )

    def check_cache(self) -> None:
        """Raises BlockLeakError where the cache's books and the open sessions' blocks do not agree."""
        self._runner.pool.check([session.cache.block_table for session in self._open.values()])

    # --- Commands ----------------------------------------------------------------------------------------------------

    def open_session(self, command: OpenSession, prompt_token_ids: Sequence[int], sink: SessionSink) -> None:
        """Takes a session on and answers Opened, Fenced or an error through its sink."""
        fencing_epoch = self.handover.fencing_epoch(command)
        if fencing_epoch is not None:
            sink(Fenced(fencing_epoch))
            return
        try:
            session = self._new_session(command, prompt_token_ids, sink)
            self._replace(session)
            ended = session.replay_output() or self.handover.go_on(session, command)
            if ended is None:
                self._enter(session)
        except SpecdecError as error:
            sink(error)
            return
        self.handover.opened(session)
        sink(
            Opened(
                attach_secret=session.attach_secret,
                prompt_token_ids=session.prompt_token_ids,
                acceptance_rule=session.rule,
                numerics=self._runner.numerics,
                model=self._model_name,
                max_new_tokens=session.max_new_tokens,
                kept_token_ids=session.kept_token_ids,
                kept_epoch=session.kept_epoch,
            )
        )
        if ended is not None:
            self._tell_end(session, ended)
            self._admit()  # somebody may have waited for what the owner before held

    def close_session(self, session_id: SessionId, sink: SessionSink) -> None:
        """Frees the session that was opened with this sink, since nobody reads it any more. Another one stays.

        Its tokens are kept for a while: its owner may be gone before it could hand on what it was told.
        """
        session = self._open.get(session_id)
        if session is not None and session.sink is sink:
            self.handover.leave(session)
            self._release(session)
            self._admit()

    def drain(self, grace_s: float) -> None:
        """Takes no new sessions and tells the owners of the open ones."""
        self._draining = True
        for session in self._open.values():
            session.sink(Draining(grace_s))

    def end_sessions(self) -> None:
        """Ends what is still open, since the process goes: an owner that has not gone elsewhere yet must do so now."""
        for session in list(self._open.values()):
            session.sink(DrainingError("the verifier is gone"))
            self._release(session)

    def _new_session(self, command: OpenSession, prompt_token_ids: Sequence[int], sink: SessionSink) -> VerifierSession:
        if self._draining:
            raise DrainingError("the verifier is draining")
        if command.spec.model not in ("", self._model_name):
            raise UnknownModelError(f"this verifier holds {self._model_name}", model=self._model_name)
        before = self._open.get(command.session_id)
        if before is not None and before.epoch == command.epoch:
            raise SessionExistsError("this owner has the session open already")
        committed = command.committed_token_ids
        if command.prompt_length == 0:  # what is committed is output alone
            committed = (*prompt_token_ids, *committed)
            command = dataclasses.replace(command, prompt_length=len(prompt_token_ids))
        max_new_tokens = check_request(command, committed, self._target, self._limits.default_max_new_tokens)
        self._num_arrivals += 1
        return VerifierSession(
            command,
            committed,
            max_new_tokens,
            self._runner.new_cache(command.tenant.encode()),
            OutputText(self._tokenizer, command.spec.stop.stop_strings),
            self._target,
            sink,
            self._num_arrivals,
        )

    def _replace(self, session: VerifierSession) -> None:
        """This session's owner has it from now on; the one before, if there is one, is fenced."""
        before = self._open.get(session.session_id)
        if before is not None:
            self.handover.leave(before)
            before.sink(Fenced(session.epoch))
            self._release(before)
        self.handover.take(session, self._open)

    def _enter(self, session: VerifierSession) -> None:
        """Admits a session or lets it wait. Where too many wait already one of them is turned away; raises
        OverloadedError where it is this one."""
        self._open[session.session_id] = session
        self._admission.enter(session)
        self._admit()
        is_waiting = session.session_id not in self._admission.active
        if is_waiting and self._admission.num_waiting > self._limits.max_waiting_sessions:
            overloaded = OverloadedError("too many sessions wait", retry_after_s=self._admission.retry_after_s())
            turned_away = self._admission.one_too_many
            self._release(turned_away)
            if turned_away is session:
                raise overloaded
            turned_away.sink(overloaded)

    def _admit(self) -> None:
        admitted = self._admission.admit(self._clock())
        if admitted:
            self._wait_until = 0.0
            self._assign_budgets()
            for session in admitted:
                self.drafters.tell_budget(session)
        self._observe_occupancy()

    def _release(self, session: VerifierSession) -> None:
        self.drafters.end_session(session)
        self._admission.remove(session)
        self._flow.forget(session)
        del self._open[session.session_id]
        self.handover.end(session)
        self._is_checked = False
        self._observe_occupancy()

    def _observe_occupancy(self) -> None:
        self._observer.sessions(len(self._admission.active), self._admission.num_waiting)
        self._observer.blocks(self._runner.pool.num_used_blocks, self._runner.pool.num_blocks)

    def _fail(self, session: VerifierSession) -> None:
        session.sink(SpecdecError("the round failed"))
        self._release(session)

    def _finish(self, session: VerifierSession, reason: FinishReason) -> None:
        self._release(session)
        self._tell_end(session, reason)

    def _tell_end(self, session: VerifierSession, reason: FinishReason) -> None:
        usage = Usage(session.prompt_length, session.num_output_tokens, session.num_cached_prompt_tokens)
        self._observer.finished(reason, usage)
        session.sink(
            SessionFinished(
                reason=reason,
                usage=usage,
                speculative=session.tally.frozen(),
                text=session.last_text(reason),
            )
        )

    def _assign_budgets(self) -> None:
        self._flow.assign(self._admission.active.values())
        self._observer.speculating(self._flow.num_speculating)
        for session in self._admission.active.values():
            if session.num_uncached > 1:  # the others' rounds tell it
                self.drafters.tell_budget(session)

    # --- Steps -------------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Runs one forward if there are rows for it.

        Returns 0 when more may be done at once, the time to look again when every session waits for a draft, and None
        when there is nothing to do until a command comes. Then too it is called every second or so: what is kept for a
        while ends here.
        """
        started_at = self._clock()
        self.handover.expire(started_at)
        if not self._open:
            self._last_step_ended_at = None
            self.drafters.take_drafted()
            self._check_when_idle(started_at)
            return None
        if started_at < self._wait_until and self.drafters.num_changes < self._wait_for_changes:
            return self._wait_until
        self._assign_budgets()
        sessions = self._admission.active.values()
        plan = plan_step(
            self._policy,
            sessions,
            self._shares,
            started_at,
            forward_s=self._flow.expected_forward_s(sessions),
            ready_since=self._ready_since,
        )
        for session, pending, reason in plan.dropped:
            self.drafters.drop_pending(session, pending, reason)
        if not plan.rows:
            return self._wait(plan, started_at)
        self._ready_since = None
        planned = self._room.make(plan.rows)
        if planned:
            num_tokens = self._run(planned, started_at)
            self._end_step(planned, num_tokens, started_at)
        self._admit()
        return 0.0

    def _end_step(self, planned: Sequence[SessionRows], num_tokens: int, started_at: float) -> None:
        before, now = self._last_step_ended_at, self._clock()
        waited_s = 0.0 if before is None else started_at - before
        elapsed_s = waited_s + now - started_at
        self._flow.observe_step(planned, num_tokens, self.drafters.take_drafted(), elapsed_s, waited_s)
        self._last_step_ended_at = now

    def _wait(self, plan: StepPlan, now: float) -> float | None:
        """Waits for drafts: until some time, or until so many came. Who comes new is looked at at once."""
        if plan.next_deadline is None:
            self._last_step_ended_at = None
        else:
            self._wait_until = plan.next_deadline
            self._wait_for_changes = self.drafters.num_changes + plan.num_awaited_drafts
        if not plan.is_anyone_ready:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        return plan.next_deadline

    def _run(self, planned: Sequence[SessionRows], started_at: float) -> int:
        """One forward and what it decides: so many tokens. One that fails is run again in halves: who breaks it alone,
        fails alone."""
        for rows in planned:
            session = rows.session
            if session.last_commit_at is None:
                session.last_commit_at = started_at
            if session.attachment is not None and rows.gave_up:
                session.attachment.delivers = False
        num_rows = sum(rows.num_rows for rows in planned)
        forward_started_at = self._clock()
        logits = self._forward(planned)
        if logits is None:
            half = len(planned) // 2
            return sum(self._run(part, started_at) for part in (planned[:half], planned[half:]) if half)
        forward_time_s = self._clock() - forward_started_at
        self._flow.observe_forward(num_rows, forward_time_s)
        for rows in planned:
            self._num_served += 1
            rows.session.last_served = self._num_served
            self._shares.charge(rows.session.tenant, rows.num_rows)
        num_tokens = self._take(planned, logits, started_at, forward_time_s)
        self._observer.step(num_rows, forward_time_s, self._clock() - started_at)
        return num_tokens

    def _forward(self, planned: Sequence[SessionRows]) -> Tensor | None:
        """Logits; None where the forward failed, and with it the session that was in it alone."""
        try:
            return self._runner.forward_rows([runner_rows(rows) for rows in planned])
        except Exception:
            log.exception("forward failed", extra={"num_sessions": len(planned)})
        if len(planned) == 1:
            self._fail(planned[0].session)
        return None

    def _take(self, planned: Sequence[SessionRows], logits: Tensor, started_at: float, forward_time_s: float) -> int:
        """Commits what the forward decided, so many tokens, and lets what it computed be found."""
        rounds = [rows for rows in planned if rows.is_round]
        first_row = sum(1 + len(rows.draft.token_ids) for rows in rounds)
        decisions = self._rounds.decide(rounds, logits[:first_row]) if rounds else []
        judged = [
            (rows, len(decision.acceptance.accepted_node_indices))
            for rows, decision in zip(rounds, decisions, strict=True)
            if decision is not None
        ]
        self._flow.observe_rounds(judged)
        for rows, decision in zip(rounds, decisions, strict=True):
            session = rows.session
            try:
                if decision is None:
                    raise ValueError("the round could not be decided")
                ended = self._rounds.commit(rows, decision, started_at, forward_time_s)
                self._admission.publish(session)
            except Exception:
                log.exception("round failed", extra={"session_id": session.session_id})
                self._fail(session)
                continue
            if ended is not None:
                self._finish(session, ended)
        for rows in planned[len(rounds) :]:
            session = rows.session
            try:
                if session.is_scoring:
                    start = first_row
                    first_row += max(0, session.cache.length + 1 - session.scored_length)
                    self._rounds.score(rows, logits[start:first_row])
                self._admission.publish(session)
            except Exception:
                log.exception("prefill failed", extra={"session_id": session.session_id})
                self._fail(session)
        return sum(1 + num_accepted for _, num_accepted in judged)

    def _check_when_idle(self, now: float) -> None:
        if self._is_checked or now - self._checked_at < IDLE_CHECK_INTERVAL_S:
            return
        self._is_checked, self._checked_at = True, now
        try:
            self.check_cache()
        except BlockLeakError:
            log.exception("the cache's books are wrong")
            self._observer.cache_inconsistent()
