"""Run one session: from the client's request to the last frame, and leave its record as it should be.

One task per session reads the verifier's stream, hands frames to the client's outbox and commits to the record's writer
(`strict`: the frame waits for the record; `relaxed`: neither waits). Beside it run the writer and the keeper of its
drafter. Decides no token, knows no protobuf.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from enum import Enum

import structlog

from orchestrator.attachments import AttachFacts, DrafterKeeper
from orchestrator.claim import Claim, Claimant, OpenedSession
from orchestrator.cluster import Cluster
from orchestrator.outbox import FrameSink
from orchestrator.prefix import TokenPrefix
from orchestrator.record import Checkpoint, CommittedRound
from orchestrator.record_writer import RecordWriter
from orchestrator.session_store import Lease, SessionStore
from specdec.errors import (
    DrainingError,
    FencedError,
    PeerUnavailableError,
    SpecdecError,
    StoreUnavailableError,
    VerifierLostError,
)
from specdec.messages import (
    AttachmentChange,
    Commit,
    Delta,
    Draining,
    Finished,
    PromptLogprobs,
    RoundStatistics,
    SessionFinished,
    Started,
)
from specdec.params import FinishReason
from specdec.session import ClientGone, Reclaimed, Session, SessionPhase, UnexpectedEventError, VerifierGone, apply
from specdec.telemetry import OrchestratorMetrics

_NO_ROUND = RoundStatistics(0, 0, None, 0.0, 0.0, 0.0)
"""Of tokens that an earlier epoch's rounds decided."""

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class RunnerContext:
    """What all sessions of one orchestrator share."""

    cluster: Cluster
    store: SessionStore
    store_is_reachable: Callable[[], bool]
    strict: bool
    metrics: OrchestratorMetrics
    num_own_sessions: Callable[[], Mapping[str, int]] = dict
    """By verifier."""
    num_own_attachments: Callable[[], Mapping[str, int]] = dict
    """By drafter, those that are being made too."""


class StopReason(Enum):
    """Why a session is ended from outside."""

    CLIENT_GONE = "CLIENT_GONE"
    RESUMED = "RESUMED"
    CANCELLED = "CANCELLED"
    DRAINING = "DRAINING"
    FENCED = "FENCED"


class SessionRunner:
    """`start` it, and its frames (Started, Deltas, Finished; or an error of specdec.errors) go to the outbox.

    `stop` ends it early; `ended` is set when nothing of it is left to do.
    """

    def __init__(self, claim: Claim, context: RunnerContext, outbox: FrameSink) -> None:
        self._claim = claim
        self._context = context
        self._claimant = Claimant(
            claim,
            context.cluster,
            context.store,
            strict=context.strict,
            store_is_reachable=context.store_is_reachable,
            num_own_sessions=context.num_own_sessions,
        )
        self._outbox = outbox
        self._prefix = TokenPrefix(claim.committed_token_ids)
        self._stop_reason: StopReason | None = None
        self._stream_over = False
        self._task: asyncio.Task[None] | None = None
        self._opened: OpenedSession | None = None
        self._keeper: DrafterKeeper | None = None
        self._writer: RecordWriter | None = None
        self._began = time.monotonic()
        self.opened_at_unix_s = time.time()
        self.ended = asyncio.Event()
        self.session = Session(
            claim.session_id,
            self._claimant.epoch,
            claim.owner_nonce,
            prompt_length=claim.prompt_length,
            committed_length=len(claim.committed_token_ids),
        )

    @property
    def tenant(self) -> str:
        """Whom the session is for, empty where the request names nobody."""
        return self._claim.tenant

    @property
    def verifier(self) -> str:
        """Endpoint, empty before `Opened`."""
        return self._opened.verifier.endpoint if self._opened is not None else ""

    @property
    def drafter(self) -> str:
        """Endpoint of the drafter that is attached now, empty without one."""
        return self._keeper.drafter if self._keeper is not None else ""

    @property
    def chosen_drafter(self) -> str:
        """The same, or of the one that is about to be."""
        return self._keeper.chosen if self._keeper is not None else ""

    def start(self, on_ended: Callable[[], object]) -> None:
        """`on_ended` is called when nothing of the session is left to do."""
        self._task = asyncio.create_task(self._run(), name=f"session {self._claim.session_id}")
        self._task.add_done_callback(self._on_done)
        self._task.add_done_callback(lambda _: on_ended())

    def stop(self, reason: StopReason) -> None:
        """The verifier's rows are freed at once. Only the first reason counts, and none once the stream is over."""
        if self._stop_reason is None and self._task is not None and not self._stream_over:
            self._stop_reason = reason
            self._task.cancel()

    def _on_done(self, _task: asyncio.Task[None]) -> None:
        self._outbox.close()  # a task that is cancelled before its first step runs none of its own endings
        self._writer = None  # it holds this runner: both are freed now, not when the collector comes
        self.ended.set()

    async def _run(self) -> None:
        running = self._context.metrics.num_requests_running
        running.inc()
        error: SpecdecError | None = None
        try:
            await self._serve()
        except SpecdecError as known:
            error = known
        except UnexpectedEventError as unexpected:
            _log.error("verifier_broke_contract", session_id=self._claim.session_id, error=str(unexpected))
            error = VerifierLostError("the verifier broke the protocol; the session can be resumed")
        except asyncio.CancelledError:
            error = self._end_by_request()
        except Exception as unknown:
            _log.exception("session_failed", session_id=self._claim.session_id)
            error = SpecdecError(f"the session failed: {type(unknown).__name__}")
        self._stream_over = True
        self._outbox.close(error)
        running.dec()
        await self._leave_record()

    def _end_by_request(self) -> SpecdecError | None:
        match self._stop_reason:
            case StopReason.CANCELLED:
                usage, speculative = self.session.usage, self.session.speculative
                with contextlib.suppress(SpecdecError):  # a client that does not read is not told
                    finished = Finished(FinishReason.CANCELLED, usage, speculative, "", self._claim.sample_index)
                    self._outbox.put(finished)
                self._context.metrics.request_success.labels(FinishReason.CANCELLED.value).inc()
                return None
            case StopReason.DRAINING:
                return DrainingError("the orchestrator goes away; resume elsewhere")
            case StopReason.FENCED | StopReason.RESUMED:
                return FencedError("another owner has the session")
            case _:
                return None

    async def _serve(self) -> None:
        waiting = self._context.metrics.num_requests_waiting
        waiting.inc()
        try:
            opening = await self._claimant.take()
        finally:
            waiting.dec()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(opening.events))
            await self._begin(opening)
            for task in self._side_tasks():
                stack.push_async_callback(cancel_and_wait, task)
            await self._relay(opening)

    async def _begin(self, opening: OpenedSession) -> None:
        opened = opening.opened
        self.session = apply(apply(self.session, Reclaimed(self._claimant.epoch)), opened)
        self._opened = opening
        if len(self._prefix) == 0:
            self._prefix.extend(opened.prompt_token_ids)
            self._context.metrics.prompt_tokens.inc(len(opened.prompt_token_ids))
        num_received = len(self._prefix)
        self._prefix.extend(opened.kept_token_ids)
        lease = Lease(self._claim.session_id, self.session.epoch, self._claim.owner_nonce)
        self._writer = RecordWriter(self._context.store, lease, self._checkpoint)
        if self._context.strict:
            await self._writer.flush()
        self._outbox.put(
            Started(
                session_id=self._claim.session_id,
                model=opened.model,
                seed=self._claim.spec.sampling.seed or 0,
                acceptance_rule=opened.acceptance_rule,
                num_prompt_tokens=self.session.prompt_length,
                numerics_fingerprint=opened.numerics.fingerprint,
            )
        )
        if opened.kept_token_ids:
            # Their text comes with the next commit: the verifier counts text from what it was given as committed.
            kept = tuple(opened.kept_token_ids)
            self._outbox.put(Delta("", kept, num_received, _NO_ROUND, sample_index=self._claim.sample_index))

    def _side_tasks(self) -> list[asyncio.Task[None]]:
        tasks = []
        if self._writer is not None:
            writing = asyncio.create_task(self._writer.run())
            writing.add_done_callback(self._on_writer_done)
            tasks.append(writing)
        speculation = self._claim.spec.speculation
        if self._opened is not None and not speculation.disabled and speculation.max_draft_tokens != 0:
            self._keeper = DrafterKeeper(
                self._context.cluster,
                self._attach_facts(self._opened),
                self._prefix.snapshot,
                self._context.num_own_attachments,
            )
            tasks.append(asyncio.create_task(self._keeper.run()))
        return tasks

    def _on_writer_done(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and writing.exception() is not None:
            self.stop(StopReason.FENCED)

    async def _relay(self, opening: OpenedSession) -> None:
        try:
            async for event in opening.events:
                self.session = apply(self.session, event)
                match event:
                    case Commit():
                        await self._relay_commit(event)
                    case PromptLogprobs():
                        self._outbox.put(event)
                    case SessionFinished():
                        index = self._claim.sample_index
                        self._outbox.put(Finished(event.reason, event.usage, event.speculative, event.text, index))
                        self._stream_over = True  # what ends the session from outside comes too late now
                        self._outbox.close()
                        self._context.metrics.request_success.labels(event.reason.value).inc()
                        return
                    case AttachmentChange():
                        if self._keeper is not None:
                            self._keeper.note(event)
                    case Draining():
                        _log.info("verifier_draining", session_id=self._claim.session_id, verifier=self.verifier)
        except PeerUnavailableError as error:
            self.session = apply(self.session, VerifierGone())
            raise VerifierLostError("the verifier was lost; the session can be resumed") from error
        if self.session.phase is SessionPhase.FENCED:
            raise FencedError("another owner has the session")
        self.session = apply(self.session, VerifierGone())
        raise VerifierLostError("the verifier ended the stream; the session can be resumed")

    async def _relay_commit(self, commit: Commit) -> None:
        metrics = self._context.metrics
        if commit.round == 1:
            metrics.time_to_first_token_seconds.observe(time.monotonic() - self._began)
        self._prefix.extend(commit.token_ids)
        committed = CommittedRound(
            round=commit.round,
            base_position=commit.base_position,
            token_ids=commit.token_ids,
            prefix_digest=self._prefix.digest(),
            verifier_cached_length=commit.cached_length,
            drafter_cached_length=self.session.drafter_cached_length,
            drafter=self.drafter,
        )
        delta = Delta(
            text=commit.text,
            token_ids=commit.token_ids,
            position=commit.base_position,
            round=commit.statistics,
            token_texts=commit.token_texts,
            logprobs=commit.logprobs,
            sample_index=self._claim.sample_index,
        )
        if self._writer is not None:
            self._writer.push(committed)
            if self._context.strict:
                await self._writer.flush()
        self._outbox.put(delta)
        metrics.generation_tokens.inc(len(commit.token_ids))

    async def _leave_record(self) -> None:
        """The record after the stream: finished, or free for a Resume. Whoever cancels a session deletes its record."""
        if self._stop_reason is StopReason.CANCELLED:
            return
        if self.session.phase is SessionPhase.FENCED or self._stop_reason is StopReason.FENCED:
            return
        if self._writer is not None:
            if self.session.phase in (SessionPhase.OPENED, SessionPhase.STREAMING):
                self.session = apply(self.session, ClientGone())
            await self._writer.close(self.session.finish_reason)
        elif self._claimant.epoch:
            lease = Lease(self._claim.session_id, self._claimant.epoch, self._claim.owner_nonce)
            with contextlib.suppress(StoreUnavailableError):
                await self._context.store.release(lease)

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            raise UnexpectedEventError("a checkpoint before Opened")
        opened, session = self._opened.opened, self.session
        spec = self._claim.spec
        in_force = dataclasses.replace(
            spec,
            model=opened.model,
            sampling=dataclasses.replace(spec.sampling, acceptance_rule=opened.acceptance_rule),
            stop=dataclasses.replace(spec.stop, max_new_tokens=opened.max_new_tokens),
        )
        return Checkpoint(
            session_id=session.session_id,
            epoch=session.epoch,
            owner_nonce=session.owner_nonce,
            round=session.round,
            request=in_force,
            model=opened.model,
            numerics_fingerprint=opened.numerics.fingerprint,
            verifier=self.verifier,
            drafter=self.drafter,
            prompt_length=session.prompt_length,
            verifier_cached_length=session.verifier_cached_length,
            drafter_cached_length=session.drafter_cached_length,
            prefix_digest=self._prefix.digest(),
            token_ids=self._prefix.snapshot(),
            tenant=self._claim.tenant,
            sample_index=self._claim.sample_index,
        )

    def _attach_facts(self, opening: OpenedSession) -> AttachFacts:
        status = opening.verifier.status
        return AttachFacts(
            session_id=self._claim.session_id,
            epoch=self.session.epoch,
            attach_secret=opening.opened.attach_secret,
            verifier_endpoint=opening.verifier.endpoint,
            tokenizer_fingerprint=status.model.tokenizer_fingerprint if status and status.model else "",
            spec=self._claim.spec,
            acceptance_rule=opening.opened.acceptance_rule,
            prompt_length=self.session.prompt_length,
            sample_index=self._claim.sample_index,
        )


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Returns when the task has ended, whatever it ended with."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
