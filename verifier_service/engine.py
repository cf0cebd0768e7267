"""The verifier's engine: what is open, one forward at a time, and what each forward decides.

Commands come in between steps; `step` schedules rows, runs one ragged forward, verifies drafts, commits tokens and
rolls caches back. It knows no gRPC, no threads and no wall clock: events leave through the sinks that came with the
commands, time comes from `clock`. One thread calls it.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.decoding.acceptance import accept
from specdec.decoding.processing import process_logits
from specdec.errors import (
    DrainingError,
    OverloadedError,
    SessionExistsError,
    SpecdecError,
    UnknownModelError,
)
from specdec.ids import Epoch, Round, SessionId
from specdec.messages import (
    Commit,
    Draining,
    Fenced,
    Load,
    Opened,
    OpenSession,
    RoundStatistics,
    SessionFinished,
    Usage,
)
from specdec.model.runner import ModelRunner, Rows
from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from specdec.params import FinishReason
from verifier_service.drafters import Drafters
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SchedulerPolicy, SessionRows, draft_budget, plan_step
from verifier_service.session import SessionSink, TargetLimits, VerifierSession, check_request

log = logging.getLogger(__name__)

MAX_REMEMBERED_OWNERS = 65_536
OVERLOAD_RETRY_S = 1.0


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """How much the engine takes on: sessions that hold a cache, sessions that wait for one of those to end, and the
    output limit of requests that give none."""

    max_sessions: int
    max_waiting_sessions: int
    default_max_new_tokens: int


class Engine:
    """Decides tokens for every open session."""

    def __init__(
        self,
        model_name: str,
        runner: ModelRunner,
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
            end_token_ids=tokenizer.end_token_ids,
        )
        self._active: OrderedDict[SessionId, VerifierSession] = OrderedDict()
        self._waiting: deque[VerifierSession] = deque()
        self._owners: OrderedDict[SessionId, tuple[Epoch, bytes]] = OrderedDict()
        self._draining = False
        self.drafters = Drafters(
            find_session=self._find,
            budget_of=lambda session: draft_budget(policy, session, len(self._active)),
            tokenizer_fingerprint=tokenizer.fingerprint,
            target=self._target,
            draft_wait_s=policy.draft_wait_s,
            observer=observer,
            clock=clock,
        )

    def load(self) -> Load:
        """How busy the engine is. May be called from any thread: it works on a copy."""
        active, waiting = list(self._active.values()), list(self._waiting)
        return Load(
            num_active_sessions=len(active),
            num_waiting_sessions=len(waiting),
            kv_used_bytes=sum(session.cache.num_bytes for session in active),
            num_attachments=sum(session.attachment is not None for session in (*active, *waiting)),
        )

    # --- Commands ----------------------------------------------------------------------------------------------------

    def open_session(self, command: OpenSession, prompt_token_ids: Sequence[int], sink: SessionSink) -> None:
        """Takes a session on and answers Opened, Fenced or an error through its sink."""
        known_epoch, known_nonce = self._owner(command.session_id)
        if command.epoch < known_epoch or (command.epoch == known_epoch and command.owner_nonce != known_nonce):
            sink(Fenced(known_epoch))
            return
        try:
            session = self._new_session(command, prompt_token_ids, sink)
        except SpecdecError as error:
            sink(error)
            return
        self._remember_owner(session)
        sink(
            Opened(
                attach_secret=session.attach_secret,
                prompt_token_ids=session.prompt_token_ids,
                acceptance_rule=session.rule,
                numerics=self._runner.numerics,
                model=self._model_name,
                max_new_tokens=session.max_new_tokens,
            )
        )
        ended = session.replay_output()
        if ended is not None:
            self._finish(session, ended)
        else:
            self._waiting.append(session)
            self._admit()

    def close_session(self, session_id: SessionId, sink: SessionSink) -> None:
        """Frees the session that was opened with this sink, since nobody reads it any more. Another one stays."""
        session = self._find(session_id)
        if session is not None and session.sink is sink:
            self._release(session)
            self._admit()

    def drain(self, grace_s: float) -> None:
        """Takes no new sessions and tells the owners of the open ones."""
        self._draining = True
        for session in [*self._active.values(), *self._waiting]:
            session.sink(Draining(grace_s))

    def _new_session(self, command: OpenSession, prompt_token_ids: Sequence[int], sink: SessionSink) -> VerifierSession:
        if self._draining:
            raise DrainingError("the verifier is draining")
        if command.spec.model not in ("", self._model_name):
            raise UnknownModelError(f"this verifier holds {self._model_name}", model=self._model_name)
        before = self._find(command.session_id)
        if before is not None and before.epoch == command.epoch:
            raise SessionExistsError("this owner has the session open already")
        no_room = len(self._active) >= self._limits.max_sessions
        if no_room and len(self._waiting) >= self._limits.max_waiting_sessions and before is None:
            raise OverloadedError("too many sessions wait", retry_after_s=OVERLOAD_RETRY_S)
        committed = command.committed_token_ids or prompt_token_ids
        command = (
            command
            if command.committed_token_ids
            else dataclasses.replace(command, prompt_length=len(prompt_token_ids))
        )
        max_new_tokens = check_request(command, committed, self._target, self._limits.default_max_new_tokens)
        session = VerifierSession(
            command,
            committed,
            max_new_tokens,
            self._runner.new_cache(),
            OutputText(self._tokenizer, command.spec.stop.stop_strings),
            self._target,
            sink,
        )
        if before is not None:
            before.sink(Fenced(command.epoch))
            self._release(before)
        return session

    def _find(self, session_id: SessionId) -> VerifierSession | None:
        found = self._active.get(session_id)
        if found is not None:
            return found
        return next((session for session in self._waiting if session.session_id == session_id), None)

    def _owner(self, session_id: SessionId) -> tuple[Epoch, bytes]:
        """Highest epoch seen and its nonce; those of an open session are never forgotten."""
        session = self._find(session_id)
        if session is not None:
            return session.epoch, session.owner_nonce
        return self._owners.get(session_id, (Epoch(0), b""))

    def _remember_owner(self, session: VerifierSession) -> None:
        self._owners[session.session_id] = (session.epoch, session.owner_nonce)
        self._owners.move_to_end(session.session_id)
        while len(self._owners) > MAX_REMEMBERED_OWNERS:
            self._owners.popitem(last=False)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._limits.max_sessions:
            session = self._waiting.popleft()
            self._active[session.session_id] = session
        self._observer.sessions(len(self._active), len(self._waiting))

    def _release(self, session: VerifierSession) -> None:
        self.drafters.end_session(session)
        session.cache.free()
        if self._active.get(session.session_id) is session:
            del self._active[session.session_id]
        elif session in self._waiting:
            self._waiting.remove(session)
        self._observer.sessions(len(self._active), len(self._waiting))

    # --- Steps -------------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Runs one forward if there are rows for it.

        Returns 0 when more may be done at once, the time to look again when every session waits for a draft, and None
        when there is nothing to do until a command comes.
        """
        plan = plan_step(self._policy, list(self._active.values()), self._clock())
        for session, pending, reason in plan.dropped:
            self.drafters.drop_pending(session, pending, reason)
        if not plan.rows:
            return plan.next_deadline
        started_at = self._clock()
        planned = [rows for rows in plan.rows if self._make_ready(rows, started_at)]
        if planned:
            self._run(planned, started_at)
        self._admit()
        return 0.0

    def _run(self, planned: Sequence[SessionRows], started_at: float) -> None:
        try:
            logits = self._runner.forward([_runner_rows(rows) for rows in planned])
        except Exception:
            log.exception("forward failed", extra={"num_sessions": len(planned)})
            for rows in planned:
                self._fail(rows.session)
            return
        forward_time_s = self._clock() - started_at
        for rows, session_logits in zip(planned, logits, strict=True):
            self._active.move_to_end(rows.session.session_id)
            if not rows.is_round:
                continue
            try:
                self._finish_round(rows, session_logits, started_at, forward_time_s)
            except Exception:
                log.exception("round failed", extra={"session_id": rows.session.session_id})
                self._fail(rows.session)

    def _make_ready(self, rows: SessionRows, started_at: float) -> bool:
        """Prepares a session for the forward. False where its cache cannot grow: it alone ends."""
        session = rows.session
        try:
            session.cache.reserve(session.cache.length + rows.num_rows)
        except (MemoryError, RuntimeError, ValueError):
            log.exception("no room for a session's cache", extra={"session_id": session.session_id})
            self._fail(session)
            return False
        if session.last_commit_at is None:
            session.last_commit_at = started_at
        if session.attachment is not None and rows.fallback_decode:
            session.attachment.delivers = False
        return True

    def _fail(self, session: VerifierSession) -> None:
        session.sink(SpecdecError("the round failed"))
        self._release(session)

    def _finish_round(self, rows: SessionRows, logits: Tensor, started_at: float, forward_time_s: float) -> None:
        session = rows.session
        base_position = session.committed_length
        acceptance = accept(
            session.rule,
            self._scores(rows, logits),
            rows.draft,
            session.noise,
            base_position,
        )
        drafted = [rows.draft.token_ids[node] for node in acceptance.accepted_node_indices]
        ended = session.end([*drafted, acceptance.next_token_id])
        num_accepted = min(len(drafted), len(ended.token_ids))
        has_next = len(ended.token_ids) > num_accepted
        if rows.draft.parent_indices is not None:
            session.cache.compact(base_position, acceptance.accepted_node_indices[:num_accepted])
        session.token_ids += ended.token_ids
        session.cache.rollback(min(session.cache.length, session.committed_length - 1))
        session.round = Round(session.round + 1)
        now = self._clock()
        statistics = RoundStatistics(
            num_draft_tokens=len(rows.draft.token_ids),
            num_accepted_tokens=num_accepted,
            next_token_kind=acceptance.next_token_kind if has_next else None,
            total_time_s=now - (session.last_commit_at or started_at),
            verify_forward_time_s=forward_time_s,
            queue_time_s=max(0.0, started_at - _ready_at(rows, started_at)),
            draft_time_s=rows.answers.draft.draft_time_s if rows.answers else None,
            round_trip_time_s=rows.answers.round_trip_time_s if rows.answers else None,
            fallback_decode=rows.fallback_decode,
        )
        session.last_commit_at = session.ready_at = now
        session.tally.count_round(statistics, draft_depth=max(map(len, rows.paths)))
        self._observer.round(statistics, len(ended.token_ids))
        self.drafters.answer_round(
            session,
            rows.answers,
            base_position,
            rows.drafters_nodes(acceptance.accepted_node_indices[:num_accepted]),
            num_accepted,
            ended.finish_reason,
        )
        session.sink(
            Commit(
                round=session.round,
                base_position=base_position,
                token_ids=ended.token_ids,
                text="".join(ended.texts),
                token_texts=ended.texts,
                statistics=statistics,
                cached_length=session.cache.length,
            )
        )
        if ended.finish_reason is not None:
            self._finish(session, ended.finish_reason)

    def _scores(self, rows: SessionRows, logits: Tensor) -> Tensor:
        session = rows.session
        output_token_ids = session.token_ids[session.prompt_length :]
        return process_logits(
            logits,
            session.spec.sampling,
            prompt_token_ids=session.prompt_token_ids,
            output_token_ids_per_row=[[*output_token_ids, *path] for path in rows.paths],
            suppressed_token_ids=session.end_token_ids,
            vocabulary_size=self._target.num_real_tokens,
        )

    def _finish(self, session: VerifierSession, reason: FinishReason) -> None:
        self._release(session)
        self._observer.finished(reason, session.prompt_length)
        session.sink(
            SessionFinished(
                reason=reason,
                usage=Usage(session.prompt_length, session.num_output_tokens),
                speculative=session.tally.frozen(),
                text=session.held_back_text(reason),
            )
        )


def _runner_rows(rows: SessionRows) -> Rows:
    """Committed tokens that are not cached yet, then the draft; logits from the last committed token on."""
    session = rows.session
    cached = session.cache.length
    prefill = session.token_ids[cached : cached + rows.num_prefill]
    parents = rows.draft.parent_indices
    parent_rows = None
    if parents is not None:
        last = rows.num_prefill - 1
        parent_rows = [*range(-1, last), *(last + 1 + parent for parent in parents)]
    return Rows(
        cache=session.cache,
        token_ids=[*prefill, *rows.draft.token_ids],
        parent_rows=parent_rows,
        logits_from=rows.num_prefill - 1 if rows.is_round else rows.num_prefill,
    )


def _ready_at(rows: SessionRows, started_at: float) -> float:
    if rows.answers is not None:
        return rows.answers.arrived_at
    return started_at if rows.session.ready_at is None else rows.session.ready_at
