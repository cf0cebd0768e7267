"""The life of one session here: from the client's request over one verifier after another to the last frame, and its
record left as it should be.

Knows when a session goes on at another verifier and when it ends. Decides no token, knows no protobuf.
"""

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import structlog

from orchestrator.claim import Claim
from orchestrator.epoch_stream import EpochStream
from orchestrator.opening import OpenedSession, Opener
from orchestrator.outbox import FrameSink
from orchestrator.ownership import Ownership
from orchestrator.progress import Progress
from orchestrator.record import Checkpoint
from orchestrator.record_writer import RecordWriter
from orchestrator.runner_context import RunnerContext
from specdec.errors import (
    DeadlineError,
    DrainingError,
    FencedError,
    NumericsUnavailableError,
    SpecdecError,
    StoreUnavailableError,
    VerifierLostError,
)
from specdec.params import FinishReason
from specdec.session import NEXT_PHASE, ClientGone, GaveUp, Session, SessionPhase, VerifierGone

_MAX_QUICK_LOSSES = 6
_QUICK_LOSS_S = 1.0
"""A verifier that was lost so soon counts against the session itself: it may be what kills them."""
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_RETRY_AFTER_S = 1.0

_log = structlog.get_logger(__name__)


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
        self._outbox = outbox
        self._progress = Progress(claim)
        self._ownership = Ownership(
            claim,
            self._progress,
            context.store,
            strict=context.strict,
            store_is_reachable=context.store_is_reachable,
        )
        self._opener = Opener(claim, self._progress, self._ownership, context)
        self._stop_reason: StopReason | None = None
        self._stream_over = False
        self._task: asyncio.Task[None] | None = None
        self._stream: EpochStream | None = None
        self._writer: RecordWriter | None = None
        self._last_verifier = ""
        self._attachment_ids = itertools.count(1)
        self._began = time.monotonic()
        self.opened_at_unix_s = time.time()
        self.ended = asyncio.Event()

    @property
    def session(self) -> Session:
        return self._progress.session

    @property
    def tenant(self) -> str:
        """Whom the session is for, empty where the request names nobody."""
        return self._claim.tenant

    @property
    def age_s(self) -> float:
        """Since its stream began here."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Nothing more is streamed; its record is being closed."""
        return self._stream_over

    @property
    def num_received_tokens(self) -> int:
        """Output that the client had when its stream began."""
        return len(self._claim.committed_token_ids) - self._claim.prompt_length

    def agrees_with(self, received_token_ids: Sequence[int]) -> bool:
        """Whether the output so far and these begin alike, as far as both go."""
        output = self._progress.known_token_ids()[self.session.prompt_length :]
        return all(ours == theirs for ours, theirs in zip(output, received_token_ids, strict=False))

    @property
    def num_failovers(self) -> int:
        """How often it went on at another verifier."""
        return self._progress.num_failovers

    @property
    def verifier(self) -> str:
        """Endpoint, empty while there is none."""
        return self._stream.verifier if self._stream is not None else ""

    @property
    def drafter(self) -> str:
        """Endpoint of the drafter that is attached now, empty without one."""
        return self._stream.drafter if self._stream is not None else ""

    @property
    def chosen_drafter(self) -> str:
        """The same, or of the one that is about to be."""
        return self._stream.chosen_drafter if self._stream is not None else ""

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

    def leave_drafter(self, endpoint: str) -> None:
        """It is to be empty: another one drafts for the session, where there is one."""
        if self._stream is not None:
            self._stream.leave_drafter(endpoint)

    def _on_done(self, _task: asyncio.Task[None]) -> None:
        if not self._stream_over:  # a task that is cancelled before its first step runs none of its own endings
            self._stream_over = True
            self._outbox.close(self._end_by_request())
        self._writer = self._stream = None  # the writer holds this runner: freed now, not when the collector comes
        self.ended.set()

    async def _run(self) -> None:
        running = self._context.metrics.num_requests_running
        running.inc()
        error: SpecdecError | None = None
        try:
            await self._serve_in_time()
        except SpecdecError as known:
            error = known
        except asyncio.CancelledError:
            error = self._end_by_request()
        except Exception as unknown:
            _log.exception("session_failed", session_id=self._claim.session_id)
            error = SpecdecError(f"the session failed: {type(unknown).__name__}")
        self._stream_over = True
        self._outbox.close(self._with_hint(error))
        running.dec()
        await self._leave_record()

    def _end_by_request(self) -> SpecdecError | None:
        match self._stop_reason:
            case StopReason.CANCELLED:
                with contextlib.suppress(SpecdecError):  # a client that does not read is not told
                    self._outbox.put(self._progress.cancelled())
                self._context.metrics.request_success.labels(FinishReason.CANCELLED.value).inc()
                return None
            case StopReason.DRAINING:
                return DrainingError("the orchestrator goes away; resume elsewhere", retry_after_s=_RETRY_AFTER_S)
            case StopReason.FENCED | StopReason.RESUMED:
                return FencedError("another owner has the session")
            case _:
                return None

    def _with_hint(self, error: SpecdecError | None) -> SpecdecError | None:
        """Whoever may resume the session is told which, and that it makes sense soon."""
        is_resumable = isinstance(
            error, DrainingError | VerifierLostError | NumericsUnavailableError | StoreUnavailableError
        )
        if error is not None and is_resumable and self._progress.was_opened:
            error.metadata = {**error.metadata, "session_id": self._claim.session_id, "resumable": "true"}
            error.retry_after_s = error.retry_after_s or _RETRY_AFTER_S
        return error

    async def _serve_in_time(self) -> None:
        deadline = self._claim.deadline  # the event loop's clock is the monotonic one
        try:
            async with asyncio.timeout_at(deadline):
                await self._serve()
        except TimeoutError as error:
            raise DeadlineError("the request's deadline passed") from error

    async def _serve(self) -> None:
        metrics = self._context.metrics
        opening = await self._taken(self._opener.take)
        metrics.prompt_tokens.inc(len(opening.opened.prompt_token_ids))
        num_quick_losses = 0
        while True:
            self._stream = self._stream_of(opening)
            try:
                await self._stream.run(lambda: self.stop(StopReason.FENCED), self._may_move)
                break
            except VerifierLostError as error:
                lost_at = time.monotonic()
                num_quick_losses = num_quick_losses + 1 if self._stream.age_s < _QUICK_LOSS_S else 0
                left = opening.verifier
                self._leave_verifier(error)
                if num_quick_losses > _MAX_QUICK_LOSSES:
                    message = f"{num_quick_losses} verifiers were lost one after the other; it can be resumed"
                    raise VerifierLostError(message) from error
            if num_quick_losses > 1:
                await asyncio.sleep(min(_MIN_BACKOFF_S * 2 ** (num_quick_losses - 2), _MAX_BACKOFF_S))
            opening = await self._taken(functools.partial(self._opener.take_again, left))
            metrics.failovers.inc()
            metrics.failover_seconds.observe(time.monotonic() - lost_at)
        self._stream_over = True  # what ends the session from outside comes too late now
        self._outbox.close()
        if (reason := self.session.finish_reason) is not None:
            metrics.request_success.labels(reason.value).inc()

    async def _taken(self, take: Callable[[], Awaitable[OpenedSession]]) -> OpenedSession:
        waiting = self._context.metrics.num_requests_waiting
        with waiting.track_inprogress():
            async with self._ownership.kept(on_fenced=lambda: self.stop(StopReason.FENCED)):
                return await take()

    def _stream_of(self, opening: OpenedSession) -> EpochStream:
        self._last_verifier = opening.verifier.endpoint
        self._writer = RecordWriter(self._context.store, self._ownership.lease, self._checkpoint)
        return EpochStream(
            self._claim,
            opening,
            self._progress,
            self._writer,
            self._outbox,
            self._context,
            arrived_at=self._began,
            attachment_ids=self._attachment_ids,
        )

    def _may_move(self) -> bool:
        return self._opener.has_equal_besides(self.verifier)

    def _leave_verifier(self, error: VerifierLostError) -> None:
        """What was decided so far stays; who decides the rest is open."""
        self._progress.apply(VerifierGone())
        _log.warning(
            "verifier_left",
            session_id=self._claim.session_id,
            verifier=self.verifier,
            because=error.message,
            committed_length=self.session.committed_length,
        )
        self._stream = None

    async def _leave_record(self) -> None:
        """The record after the stream: finished, or free for a Resume. Whoever cancels a session deletes its record."""
        phase, finish_reason = self.session.phase, self.session.finish_reason
        if phase is not SessionPhase.FINISHED and phase is not SessionPhase.FENCED:
            gave_up = phase in NEXT_PHASE[GaveUp] and self._stop_reason is None
            self._progress.apply(GaveUp() if gave_up else ClientGone())
        if phase is SessionPhase.FENCED or self._stop_reason in (StopReason.CANCELLED, StopReason.FENCED):
            return
        if phase is SessionPhase.BUMPED:  # no stream of this epoch wrote what the last one's writer may not have
            self._writer = RecordWriter(self._context.store, self._ownership.lease, self._checkpoint)
        if self._writer is not None and self._progress.was_opened:
            await self._writer.close(finish_reason)
        elif self._ownership.epoch:
            with contextlib.suppress(StoreUnavailableError):
                await self._context.store.release(self._ownership.lease)

    def _checkpoint(self) -> Checkpoint:
        return self._progress.checkpoint(self._last_verifier, self.drafter)
