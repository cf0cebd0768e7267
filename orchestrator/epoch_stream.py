"""One verifier's stream of a session, from `Opened` until it ends: frames to the client, commits to the record.

`strict`: a frame waits for the record; `relaxed`: neither waits. Beside the stream run the record's writer and the
keeper of its drafter. What comes after a verifier that is lost is not known here.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import structlog

from orchestrator.attach_attempt import AttachFacts
from orchestrator.attachments import DrafterKeeper
from orchestrator.breaker import Outcome
from orchestrator.claim import Claim
from orchestrator.opening import OpenedSession
from orchestrator.outbox import FrameSink
from orchestrator.progress import Progress
from orchestrator.record_writer import RecordWriter
from orchestrator.runner_context import RunnerContext
from orchestrator.side_tasks import begin_beside, cancel_and_wait
from specdec.errors import (
    DeadlineError,
    FencedError,
    OverloadedError,
    PeerUnavailableError,
    SpecdecError,
    VerifierLostError,
)
from specdec.messages import AttachmentChange, Commit, Draining, Fenced, PromptLogprobs, SessionEvent, SessionFinished
from specdec.session import UnexpectedEventError

_log = structlog.get_logger(__name__)


class EpochStream:
    """`run` it once."""

    def __init__(
        self,
        claim: Claim,
        opening: OpenedSession,
        progress: Progress,
        writer: RecordWriter,
        outbox: FrameSink,
        context: RunnerContext,
        *,
        arrived_at: float,
        attachment_ids: Iterator[int],
    ) -> None:
        """`arrived_at`: when the request came, by the monotonic clock. `attachment_ids`: those not given out yet."""
        self._claim = claim
        self._opening = opening
        self._progress = progress
        self._writer = writer
        self._outbox = outbox
        self._context = context
        self._arrived_at = arrived_at
        self._keeper = self._drafter_keeper(attachment_ids)
        self._is_draining = False
        self._began = time.monotonic()

    def leave_drafter(self, endpoint: str) -> None:
        """It is to be empty: another one drafts for the session, where there is one."""
        if self._keeper is not None:
            self._keeper.leave(endpoint)

    @property
    def verifier(self) -> str:
        return self._opening.verifier.endpoint

    @property
    def drafter(self) -> str:
        """Endpoint of the drafter that is attached now, empty without one."""
        return self._keeper.drafter if self._keeper is not None else ""

    @property
    def chosen_drafter(self) -> str:
        """The same, or of the one that is about to be."""
        return self._keeper.chosen if self._keeper is not None else ""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self, on_fenced: Callable[[], object], may_move: Callable[[], bool]) -> None:
        """Returns when the output has ended and its last frame is in the outbox.

        `on_fenced` is called where the record has another owner. `may_move` says whether another verifier would take
        the session: one that drains is left then, and read to its end otherwise.

        Raises:
            VerifierLostError: the verifier is lost, or was left; the session may go on elsewhere.
            FencedError: another owner has the session.
            SlowReaderError: the client does not read.
            StoreUnavailableError: strict, and the store does not answer.
            OverloadedError: the verifier turned away a session without output.
            DeadlineError: the client's deadline passed.
        """
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(self._opening.events))
            try:
                await self._begin()
                await stack.enter_async_context(self._side_tasks(on_fenced))
                await self._relay(may_move)
            except UnexpectedEventError as error:
                _log.error("verifier_broke_contract", session_id=self._claim.session_id, error=str(error))
                self._context.cluster.report(self._opening.verifier, Outcome.FAILED)
                raise VerifierLostError("the verifier broke the protocol") from error

    async def _begin(self) -> None:
        frames = self._progress.begin(self._opening.opened)
        if self._context.strict:
            await self._writer.flush()
        for frame in frames:
            self._outbox.put(frame)

    @contextlib.asynccontextmanager
    async def _side_tasks(self, on_fenced: Callable[[], object]) -> AsyncIterator[None]:
        def on_writer_done(writing: asyncio.Task[None]) -> None:
            if not writing.cancelled() and isinstance(writing.exception(), FencedError):  # a defect is in the log
                on_fenced()

        session_id = self._claim.session_id
        async with contextlib.AsyncExitStack() as stack:
            writing = begin_beside(self._writer.run(), f"write record {session_id}")
            writing.add_done_callback(on_writer_done)
            stack.push_async_callback(cancel_and_wait, writing)
            if self._keeper is not None:
                keeping = begin_beside(self._keeper.run(), f"keep drafter {session_id}")
                stack.push_async_callback(cancel_and_wait, keeping)
            yield

    async def _relay(self, may_move: Callable[[], bool]) -> None:
        while (event := await self._next_event()) is not None:
            match event:
                case Commit():
                    await self._relay_commit(event)
                case PromptLogprobs():
                    if (untold := self._progress.prompt_logprobs(event)) is not None:
                        self._outbox.put(untold)
                case SessionFinished():
                    self._context.cluster.report(self._opening.verifier, Outcome.WORKED)
                    for frame in self._progress.finish(event):
                        self._outbox.put(frame)
                    return
                case Fenced():
                    self._progress.apply(event)
                    raise FencedError("another owner has the session")
                case _:
                    self._progress.apply(event)
            if isinstance(event, AttachmentChange) and self._keeper is not None:
                self._keeper.note(event)
            if isinstance(event, Draining):
                self._is_draining = True
                self._context.cluster.note_draining(self._opening.verifier)
            is_left = self._is_draining or self._context.cluster.is_drained(self.verifier)
            if is_left and may_move():
                raise VerifierLostError("the verifier drains")
        self._context.cluster.report(self._opening.verifier, Outcome.FAILED)
        raise VerifierLostError("the verifier ended the stream")

    async def _next_event(self) -> SessionEvent | None:
        """None at the stream's end. It took the request when it opened the session: what it ends the stream with is its
        own trouble, not the client's."""
        try:
            return await anext(self._opening.events, None)
        except SpecdecError as error:
            if isinstance(error, DeadlineError) and self._claim.is_past_deadline:
                raise
            if isinstance(error, OverloadedError) and not self._progress.has_output:
                raise  # the client loses nothing, and is told when to come again
            is_full = isinstance(error, OverloadedError)  # and answers still
            self._context.cluster.report(self._opening.verifier, Outcome.ANSWERED if is_full else error)
            if isinstance(error, PeerUnavailableError):
                self._context.cluster.suspect(self._opening.verifier)
            raise VerifierLostError(f"the verifier ended the stream: {error.reason}") from error

    async def _relay_commit(self, commit: Commit) -> None:
        if not self._progress.has_streamed:
            self._context.metrics.time_to_first_token_seconds.observe(time.monotonic() - self._arrived_at)
        self._context.routing.note_round(self.drafter, self.verifier, self._claim.tenant, commit.statistics)
        committed, delta = self._progress.commit(commit, self.drafter)
        self._writer.push(committed)
        if self._context.strict:
            await self._writer.flush()
        self._outbox.put(delta)
        self._context.metrics.generation_tokens.inc(len(delta.token_ids))

    def _drafter_keeper(self, attachment_ids: Iterator[int]) -> DrafterKeeper | None:
        speculation = self._claim.spec.speculation
        if speculation.disabled or speculation.max_draft_tokens == 0:
            return None
        return DrafterKeeper(
            self._context.cluster,
            self._context.routing,
            self._attach_facts(),
            self._progress.known_token_ids,
            self._context.num_own_attachments,
            attachment_ids,
        )

    def _attach_facts(self) -> AttachFacts:
        verifier, opened = self._opening.verifier, self._opening.opened
        model = verifier.status.model if verifier.status is not None else None
        return AttachFacts(
            session_id=self._claim.session_id,
            epoch=self._progress.session.epoch,
            attach_secret=opened.attach_secret,
            verifier_endpoint=verifier.endpoint,
            tokenizer_fingerprint=model.tokenizer_fingerprint if model is not None else "",
            spec=self._claim.spec,
            acceptance_rule=opened.acceptance_rule,
            prompt_length=len(opened.prompt_token_ids),
            sample_index=self._claim.sample_index,
            deadline=self._claim.deadline,
            tenant=self._claim.tenant,
        )
