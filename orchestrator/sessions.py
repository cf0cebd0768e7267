"""The sessions that this orchestrator serves: begin, resume, cancel, kill, drain.

Knows every running session and what a request must look like before a verifier sees it. A request for several samples
is as many sessions, named `id.index`, behind one stream. No protobuf, no tokens decided.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence

import structlog

from orchestrator.admission import Admission, Slots
from orchestrator.claim import Claim
from orchestrator.endpoint_figures import EndpointFigures
from orchestrator.metered import MeteredSink
from orchestrator.outbox import FrameSink, Outbox
from orchestrator.record import RecordState
from orchestrator.resuming import prompt_to_resume, require_agreement, require_possible
from orchestrator.runner_context import RunnerContext
from orchestrator.samples import Placement, SampleStream
from orchestrator.session_runner import SessionRunner, StopReason
from specdec.errors import (
    DrainingError,
    FencedError,
    OverloadedError,
    ResumeMismatchError,
    SessionExistsError,
    StoreUnavailableError,
    UnknownSessionError,
)
from specdec.ids import SessionId
from specdec.messages import Delta, GenerationEvent
from specdec.params import (
    MAX_SAMPLES,
    GenerationSpec,
    prompt_token_ids,
    sample_session_id,
    validate_request_id,
    validate_session_id,
)

_NONCE_BYTES = 16
_SEED_BITS = 63
_END_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 1.0
_OUTBOX_CAPACITY = 256
"""Frames of one sample that its client may be behind."""
_MAX_CANCELLING = 16
"""Cancels under way. Each may ask the store for every sample that a request can have."""

_log = structlog.get_logger(__name__)


class Sessions:
    """One object per orchestrator."""

    def __init__(self, context: RunnerContext, admission: Admission) -> None:
        self._context = dataclasses.replace(
            context, num_own_sessions=self.num_by_verifier, num_own_attachments=self.num_by_drafter
        )
        self._admission = admission
        self._runners: dict[SessionId, SessionRunner] = {}
        self._samples: dict[SessionId, tuple[SessionId, ...]] = {}
        """The sessions of each request for several samples, while its stream runs."""
        self._num_cancelling = 0
        self._is_going = False
        self.drained = False
        """By an operator's order: no new streams, until the order is taken back."""
        self.figures = EndpointFigures()

    @property
    def draining(self) -> bool:
        """It takes no new streams."""
        return self._is_going or self.drained

    @property
    def running(self) -> Mapping[SessionId, SessionRunner]:
        return self._runners

    def num_by_verifier(self) -> Mapping[str, int]:
        return Counter(runner.verifier for runner in self._runners.values())

    def num_by_drafter(self) -> Mapping[str, int]:
        return Counter(runner.chosen_drafter for runner in self._runners.values())

    def num_at(self, endpoint: str) -> int:
        """Sessions that a verifier decides, or a drafter drafts for."""
        return self.num_by_verifier().get(endpoint, 0) + self.num_by_drafter().get(endpoint, 0)

    async def generate(
        self, session_id: str, spec: GenerationSpec, tenant: str = "", time_left_s: float | None = None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The frames of one output, or of several samples. Closing the iterator means that the client is gone.

        `time_left_s` is until the client's deadline, None where it has none.

        Raises:
            EmptyPromptError, InvalidParameterError: see GenerationSpec.validated.
            SessionExistsError, DrainingError, OverloadedError, RateLimitedError, TooManyStreamsError: it cannot begin
                here; nothing was claimed or opened.
            SpecdecError: whatever ended the stream.
        """
        name = SessionId(validate_request_id(session_id) if session_id else uuid.uuid4().hex)
        if self.is_running(name):
            raise SessionExistsError("the session id is in use")
        spec = _with_seed(spec.validated())
        self._require_open()
        slots = self._admission.admit(tenant, spec.model, spec.num_samples, time_left_s)
        try:
            if spec.num_samples == 1:
                nonce = secrets.token_bytes(_NONCE_BYTES)
                claim = Claim(name, nonce, spec, tenant=tenant, deadline=_deadline(time_left_s))
                frames = self._serve(claim, slots)
            else:
                frames = self._serve_samples(name, spec, tenant, _deadline(time_left_s), slots)
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield frame
        finally:
            slots.end_stream()

    async def resume(
        self,
        session_id: str,
        received_token_ids: Sequence[int],
        spec: GenerationSpec | None,
        tenant: str = "",
        time_left_s: float | None = None,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The rest of an output, from the first token that the client has not received.

        The session goes on from what the client has, and the verifier tells text from there on. What the record has
        beyond it no client ever saw; it is offered to the verifier, which goes on from it or from what it kept itself.
        A verifier of the numerics that decided the output so far is preferred, or the only one that will do.
        Log-probabilities go on with the tokens that are decided from then on; those of the prompt were told.

        Raises:
            UnknownSessionError: no record, none that was opened, or one of another tenant.
            ResumeMismatchError: the tokens, or the request, are not the session's.
            NotOfferedError: the record keeps no tokens, and the original request did not come along.
            EmptyPromptError, InvalidParameterError: that request could never have begun a session.
            StoreUnavailableError: the record cannot be read.
            DrainingError, OverloadedError, RateLimitedError, TooManyStreamsError: not here, or not now; what runs goes
                on, and the session can be resumed as before.
            SpecdecError: whatever ended the stream.
        """
        name = SessionId(validate_session_id(session_id))
        self._require_open()
        runner = self._runners.get(name)
        if runner is not None and runner.tenant != tenant:
            runner = None  # answered as one that is not known, from the record
        slots = self._admission.admit_resume(tenant, replaces_running=runner is not None)
        try:
            received = tuple(received_token_ids)
            deadline = _deadline(time_left_s)
            if runner is not None:
                if not runner.agrees_with(received):  # what is refused ends nothing that runs
                    raise ResumeMismatchError("the received tokens are not the session's")
                await self._end(runner, StopReason.RESUMED)
            claim = await self._claim_recorded(name, received, spec, tenant)
            if runner is None:  # else its place is free again
                self._admission.require_room(claim.spec.model, time_left_s)
            claim = dataclasses.replace(claim, deadline=deadline)
            async with contextlib.aclosing(self._serve(claim, slots)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            slots.end_stream()

    async def _claim_recorded(
        self, name: SessionId, received: tuple[int, ...], spec: GenerationSpec | None, tenant: str
    ) -> Claim:
        record = await self._context.store.read(name, tenant)
        if record is None or record.request is None or record.state not in (RecordState.OPEN, RecordState.FINISHED):
            raise UnknownSessionError("no such session")
        prompt = prompt_to_resume(record, spec)
        require_possible(record, received)
        token_ids = prompt_token_ids(prompt)
        if token_ids is not None:
            require_agreement(record, token_ids, received)
        return Claim(
            name,
            secrets.token_bytes(_NONCE_BYTES),
            dataclasses.replace(record.request, prompt=prompt, num_prompt_logprobs=None),
            committed_token_ids=(*(token_ids or ()), *received),
            prompt_length=len(token_ids or ()),
            tenant=tenant,
            sample_index=record.sample_index,
            numerics_fingerprint=record.numerics_fingerprint,
            recorded_token_ids=(record.token_ids or ())[record.prompt_length + len(received) :],
            recorded_epoch=record.epoch,
            unread_prompt_of=record if token_ids is None else None,
        )

    async def cancel(self, session_id: str, tenant: str | None) -> bool:
        """Ends a session, with all samples of its request, wherever it runs, and deletes its record. False where there
        is none, or none of this tenant; None: of any.

        Raises:
            StoreUnavailableError: it does not run here, and the store that may know it does not answer.
            OverloadedError: too many cancels are under way.
        """
        name = SessionId(validate_session_id(session_id))
        if self._num_cancelling >= _MAX_CANCELLING:
            raise OverloadedError("too many cancels at one time", retry_after_s=_RETRY_AFTER_S)
        self._num_cancelling += 1
        try:
            names = self._sessions_of(name)
            found = [self._runners[each] for each in names if each in self._runners]
            # Others' sessions are answered as those that are not known: by what the store says to this tenant.
            runners = [runner for runner in found if tenant is None or runner.tenant == tenant]
            await asyncio.gather(*(self._end(runner, StopReason.CANCELLED) for runner in runners))
            deleted = await asyncio.gather(*(self._delete_record(each, tenant, must=not runners) for each in names))
            return any(deleted) or bool(runners)
        finally:
            self._num_cancelling -= 1

    async def kill(self, session_id: str) -> bool:
        """Cancels a session that runs here, or all samples of a request, whosever it is. False where none does.

        Raises as `cancel`.
        """
        return self.is_running(session_id) and await self.cancel(session_id, tenant=None)

    def is_running(self, session_id: str) -> bool:
        """Whether a session, or a request for several samples, has its stream here."""
        return session_id in self._runners or session_id in self._samples

    async def drain(self, grace_s: float) -> None:
        """Takes no new sessions; those that run may end for `grace_s`, the rest are told to resume elsewhere."""
        self._is_going = True
        if self._runners:
            await asyncio.wait([asyncio.create_task(r.ended.wait()) for r in self._runners.values()], timeout=grace_s)
        await asyncio.gather(*(self._end(runner, StopReason.DRAINING) for runner in list(self._runners.values())))

    def leave_drafter(self, endpoint: str) -> None:
        """It is to be empty: others draft for its sessions, where there are any. Of a verifier the sessions see it."""
        for runner in self._runners.values():
            runner.leave_drafter(endpoint)

    async def _serve(self, claim: Claim, slots: Slots) -> AsyncGenerator[GenerationEvent, None]:
        if claim.session_id in self._runners:
            raise FencedError("the session is being resumed already")
        outbox = Outbox(_OUTBOX_CAPACITY)
        runner = self._start(claim, outbox, slots)
        try:
            async with contextlib.aclosing(outbox.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            runner.stop(StopReason.CLIENT_GONE)

    async def _serve_samples(
        self, name: SessionId, spec: GenerationSpec, tenant: str, deadline: float | None, slots: Slots
    ) -> AsyncGenerator[GenerationEvent, None]:
        names = tuple(sample_session_id(name, index) for index in range(spec.num_samples))
        if any(each in self._runners for each in names):
            raise SessionExistsError("the session id is in use")
        runners: list[SessionRunner] = []

        def stop_all() -> None:
            for runner in runners:
                runner.stop(StopReason.CLIENT_GONE)

        stream = SampleStream(name, names, _OUTBOX_CAPACITY, on_failed=stop_all)
        placement = Placement()
        self._samples[name] = names
        try:
            for index, outbox in enumerate(stream.outboxes):
                claim = Claim(
                    names[index],
                    secrets.token_bytes(_NONCE_BYTES),
                    spec.of_sample(index),
                    tenant=tenant,
                    sample_index=index,
                    placement=placement,
                    deadline=deadline,
                )
                runners.append(self._start(claim, outbox, slots))
            async with contextlib.aclosing(stream.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            del self._samples[name]
            stop_all()

    def _require_open(self) -> None:
        if self.draining:
            raise DrainingError("the orchestrator takes no new streams", retry_after_s=_RETRY_AFTER_S)

    def _start(self, claim: Claim, outbox: FrameSink, slots: Slots) -> SessionRunner:
        # One prefill serves all samples, and a session that goes on paid for its prompt when it began.
        charges_prompt = claim.must_be_new and claim.sample_index == 0

        def sent(delta: Delta) -> None:
            slots.charge(len(delta.token_ids))
            runner = self._runners[claim.session_id]  # by name: a runner that its own sink holds is not freed at once
            self.figures.note(delta, (runner.verifier, runner.drafter), time.monotonic())

        sink = MeteredSink(outbox, on_prompt=slots.charge if charges_prompt else None, on_delta=sent)
        runner = SessionRunner(claim, self._context, sink)
        self._runners[claim.session_id] = runner
        slots.hold()

        def ended() -> None:
            self._runners.pop(claim.session_id, None)
            slots.give_back()

        runner.start(on_ended=ended)
        return runner

    def _sessions_of(self, name: SessionId) -> tuple[SessionId, ...]:
        """The session of that name, or those of its samples; both where it runs elsewhere, which only records tell."""
        if name in self._samples:
            return self._samples[name]
        if name in self._runners or "." in name:
            return (name,)
        return (name, *(sample_session_id(name, index) for index in range(MAX_SAMPLES)))

    async def _delete_record(self, name: SessionId, tenant: str | None, *, must: bool) -> bool:
        try:
            return await self._context.store.cancel(name, tenant)
        except StoreUnavailableError:
            if must:
                raise
            _log.warning("record_not_deleted", session_id=name)
            return False

    async def _end(self, runner: SessionRunner, reason: StopReason) -> None:
        runner.stop(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await runner.ended.wait()


def _deadline(time_left_s: float | None) -> float | None:
    """By the monotonic clock."""
    return None if time_left_s is None else time.monotonic() + time_left_s


def _with_seed(spec: GenerationSpec) -> GenerationSpec:
    """A request without a seed gets one, so that it can be told, recorded and replayed."""
    if spec.sampling.seed is not None:
        return spec
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, seed=secrets.randbits(_SEED_BITS)))
