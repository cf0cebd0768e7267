"""The sessions that this orchestrator serves: begin, resume, cancel, kill, list, drain.

Knows every running session and what a request must look like before a verifier sees it. No protobuf, no tokens decided.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence

import structlog

from orchestrator.claim import Claim
from orchestrator.record import RecordState, SessionRecord
from orchestrator.session_runner import RunnerContext, SessionRunner, StopReason
from specdec.errors import (
    DrainingError,
    FencedError,
    NotOfferedError,
    OverloadedError,
    ResumeMismatchError,
    SessionExistsError,
    StoreUnavailableError,
    UnknownSessionError,
)
from specdec.ids import SessionId, digest_tokens
from specdec.messages import GenerationEvent
from specdec.params import GenerationSpec, prompt_token_ids, validate_request_id, validate_session_id

_NONCE_BYTES = 16
_SEED_BITS = 63
_END_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 1.0

_log = structlog.get_logger(__name__)


class Sessions:
    """One object per orchestrator."""

    def __init__(self, context: RunnerContext, *, max_sessions: int) -> None:
        self._context = dataclasses.replace(context, num_own_sessions=self.num_by_verifier)
        self._max_sessions = max_sessions
        self._runners: dict[SessionId, SessionRunner] = {}
        self.draining = False

    @property
    def running(self) -> Mapping[SessionId, SessionRunner]:
        return self._runners

    def num_by_verifier(self) -> Mapping[str, int]:
        return Counter(runner.verifier for runner in self._runners.values())

    async def generate(self, session_id: str, spec: GenerationSpec) -> AsyncGenerator[GenerationEvent, None]:
        """One output's frames. Closing the iterator means that the client is gone.

        Raises:
            EmptyPromptError, InvalidParameterError, UnsupportedParameterError: see GenerationSpec.validated.
            SessionExistsError, OverloadedError, DrainingError: it cannot begin here.
            SpecdecError: whatever ended the stream.
        """
        name = SessionId(validate_request_id(session_id) if session_id else uuid.uuid4().hex)
        if name in self._runners:
            raise SessionExistsError("the session id is in use")
        claim = Claim(name, secrets.token_bytes(_NONCE_BYTES), _with_seed(spec.validated()))
        async for frame in self._serve(claim):
            yield frame

    async def resume(
        self, session_id: str, received_token_ids: Sequence[int], spec: GenerationSpec | None
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The rest of an output, from the first token that the client has not received.

        The session goes on from what the client has: the verifier tells text from there on, and greedy and coupled
        sessions come to the same tokens again. What the record has beyond it no client ever saw.

        Raises:
            UnknownSessionError: no record, or none that was opened.
            ResumeMismatchError: the tokens are not the session's.
            NotOfferedError: the record keeps no tokens and the request does not bring the prompt as token ids.
            StoreUnavailableError: the record cannot be read.
            SpecdecError: whatever ended the stream.
        """
        name = SessionId(validate_session_id(session_id))
        if (runner := self._runners.get(name)) is not None:
            await self._end(runner, StopReason.RESUMED)
        record = await self._context.store.read(name)
        if record is None or record.request is None or record.state not in (RecordState.OPEN, RecordState.FINISHED):
            raise UnknownSessionError("no such session")
        prompt = _prompt_of(record, spec)
        received = tuple(received_token_ids)
        _check_received(record, prompt, received)
        claim = Claim(
            name,
            secrets.token_bytes(_NONCE_BYTES),
            dataclasses.replace(record.request, prompt=prompt),
            committed_token_ids=prompt + received,
            prompt_length=len(prompt),
        )
        async for frame in self._serve(claim):
            yield frame

    async def cancel(self, session_id: str) -> bool:
        """Ends a session wherever it runs and deletes its record. False where there is none.

        Raises:
            StoreUnavailableError: it does not run here, and the store that may know it does not answer.
        """
        name = SessionId(validate_session_id(session_id))
        runner = self._runners.get(name)
        if runner is not None:
            await self._end(runner, StopReason.CANCELLED)
        try:
            recorded = await self._context.store.cancel(name)
        except StoreUnavailableError:
            if runner is None:
                raise
            _log.warning("record_not_deleted", session_id=name)
            recorded = False
        return recorded or runner is not None

    async def drain(self, grace_s: float) -> None:
        """Takes no new sessions; those that run may end for `grace_s`, the rest are told to resume elsewhere."""
        self.draining = True
        if self._runners:
            await asyncio.wait([asyncio.create_task(r.ended.wait()) for r in self._runners.values()], timeout=grace_s)
        await asyncio.gather(*(self._end(runner, StopReason.DRAINING) for runner in list(self._runners.values())))

    async def _serve(self, claim: Claim) -> AsyncGenerator[GenerationEvent, None]:
        if self.draining:
            raise DrainingError("the orchestrator takes no new sessions", retry_after_s=_RETRY_AFTER_S)
        if claim.session_id in self._runners:
            raise FencedError("the session is being resumed already")
        if len(self._runners) >= self._max_sessions:
            raise OverloadedError("too many sessions", retry_after_s=_RETRY_AFTER_S)
        runner = SessionRunner(claim, self._context)
        self._runners[claim.session_id] = runner
        runner.start(on_ended=lambda: self._runners.pop(claim.session_id, None))
        try:
            async with contextlib.aclosing(runner.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            runner.stop(StopReason.CLIENT_GONE)

    async def _end(self, runner: SessionRunner, reason: StopReason) -> None:
        runner.stop(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await runner.ended.wait()


def _with_seed(spec: GenerationSpec) -> GenerationSpec:
    """A request without a seed gets one, so that it can be told, recorded and replayed."""
    if spec.sampling.seed is not None:
        return spec
    return dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, seed=secrets.randbits(_SEED_BITS)))


def _prompt_of(record: SessionRecord, spec: GenerationSpec | None) -> tuple[int, ...]:
    if record.token_ids is not None:
        return record.token_ids[: record.prompt_length]
    given = prompt_token_ids(spec.prompt) if spec is not None and len(spec.prompt) > 0 else None
    if given is None:
        raise NotOfferedError("the record keeps no tokens: bring the request with its prompt as token ids")
    if len(given) != record.prompt_length:
        raise ResumeMismatchError("the prompt is not the session's")
    return tuple(given)


def _check_received(record: SessionRecord, prompt: tuple[int, ...], received: tuple[int, ...]) -> None:
    """A client may be behind the record, or ahead of one that lagged; where both have tokens they are equal."""
    if record.token_ids is not None:
        output = record.token_ids[record.prompt_length :]
        num_shared = min(len(output), len(received))
        same = output[:num_shared] == received[:num_shared]
    else:
        # Without tokens only the whole prefix can be compared.
        same = (
            len(prompt + received) != record.committed_length
            or digest_tokens(prompt + received) == record.prefix_digest
        )
    limit = record.request.stop.max_new_tokens if record.request is not None else None
    if limit is not None and len(received) > limit:
        same = False
    if not same or any(token_id < 0 for token_id in received):
        raise ResumeMismatchError("the received tokens are not the session's")
