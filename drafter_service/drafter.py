"""All attachments of one drafter: attach, detach, and the loop of each. Knows streams and loops, no proposer's ways."""

import asyncio
import time
from functools import partial

import structlog

from drafter_service.attachment import Attachment
from drafter_service.device import DeviceThread
from drafter_service.draft_loop import DraftLoop
from drafter_service.proposers.base import Proposer, ProposerSession
from drafter_service.verifier_link import Entry, VerifierLink
from drafter_service.verify_client import AttachmentKey
from specdec import PROTOCOL_VERSION
from specdec.config import WireSettings
from specdec.errors import (
    AttachRefusedError,
    DeadlineError,
    DrainingError,
    InvalidParameterError,
    OverloadedError,
    PeerUnavailableError,
    UnknownSessionError,
)
from specdec.ids import AttachmentId, SessionId, digest_tokens
from specdec.messages import (
    Attach,
    Attached,
    AttachRefused,
    AttachSession,
    Load,
    ModelInfo,
)
from specdec.telemetry import DrafterMetrics
from specdec.wire.certificates import CertificateFiles

CONNECT_TIMEOUT_S = 5.0
ATTACH_TIMEOUT_S = 30.0
"""A verifier answers between two forward passes; on a CPU a chunk of prefill takes seconds."""

log = structlog.get_logger(__name__)


async def _end(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class Drafter:
    """Joins sessions and drafts for them."""

    def __init__(
        self,
        proposer: Proposer,
        device: DeviceThread,
        metrics: DrafterMetrics,
        *,
        max_sessions: int,
        max_draft_tokens: int,
        wire: WireSettings,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self._proposer = proposer
        self._device = device
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._max_draft_tokens = max_draft_tokens
        self._wire = wire
        self._certificates = certificates
        self._verifiers: dict[str, VerifierLink] = {}
        self.draining = False

    @property
    def model(self) -> ModelInfo | None:
        """The proposer's model, where it has one."""
        return self._proposer.model_info

    @property
    def load(self) -> Load:
        """How busy this drafter is."""
        num_attachments = self._num_attachments()
        return Load(
            num_active_sessions=num_attachments, num_attachments=num_attachments, kv_used_bytes=self._proposer.kv_bytes
        )

    async def attach(self, request: AttachSession) -> float:
        """Joins a session; returns the seconds that the verifier took to answer.

        Raises:
            AttachRefusedError: the verifier refused.
            DeadlineError: it did not answer in time.
            DrainingError, OverloadedError: this drafter takes no more.
            InvalidParameterError: this very attachment runs here.
            PeerUnavailableError: the verifier cannot be reached.
        """
        self._require_serving()
        verifier = self._verifier(request.verifier_endpoint)
        key = (request.session_id, request.attachment_id)
        await self._leave_earlier_epochs(request)
        self._require_room(verifier, key)
        verifier.num_joining += 1
        try:
            await verifier.client.connect(CONNECT_TIMEOUT_S)
        finally:
            verifier.num_joining -= 1
            self._require_serving()
        self._require_room(verifier, key)  # others may have joined meanwhile
        return await self._join(verifier, key, request)

    def _require_serving(self) -> None:
        if self.draining:
            raise DrainingError("this drafter is being drained")

    def _require_room(self, verifier: VerifierLink, key: AttachmentKey) -> None:
        if self._num_attachments() >= self._max_sessions:
            raise OverloadedError("this drafter has all the sessions it takes", retry_after_s=1.0)
        if key in verifier.entries:
            raise InvalidParameterError("attachment_id: in use here", field="attachment_id")

    async def _join(self, verifier: VerifierLink, key: AttachmentKey, request: AttachSession) -> float:
        entry = Entry(request, asyncio.get_running_loop().create_future())
        verifier.entries[key] = entry
        sent_at = time.monotonic()
        try:
            verifier.client.send(*key, self._attach_message(request))
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                answer = await entry.answered
            round_trip_time_s = time.monotonic() - sent_at
            if isinstance(answer, AttachRefused):
                raise AttachRefusedError(answer.message or "the verifier refused", refusal=answer.reason.value)
            await self._start(verifier, key, entry, answer)
        except BaseException as error:
            verifier.leave(key)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the verifier did not answer the attach") from None
            raise
        return round_trip_time_s

    def _attach_message(self, request: AttachSession) -> Attach:
        known = request.known_token_ids
        return Attach(
            epoch=request.epoch,
            attach_key=request.attach_key,
            known_length=len(known),
            known_digest=digest_tokens(known),
            tokenizer_fingerprint=self._proposer.tokenizer_fingerprint,
            vocabulary_size=self._proposer.vocabulary_size,
            context_limit=self._proposer.context_limit,
            protocol_version=PROTOCOL_VERSION,
        )

    async def _start(self, verifier: VerifierLink, key: AttachmentKey, entry: Entry, attached: Attached) -> None:
        request = entry.request
        attachment = Attachment(request, attached)
        session = await self._new_session(request, attached.seed)
        if verifier.entries.get(key) is not entry:
            self._device.run_and_forget(session.close)
            self._require_serving()
            raise UnknownSessionError("left while joining")
        own_limit = request.speculation.max_draft_tokens
        loop = DraftLoop(
            attachment,
            session,
            self._device,
            partial(verifier.client.send, *key),
            verifier.measured,
            self._metrics,
            self._max_draft_tokens if own_limit is None else min(own_limit, self._max_draft_tokens),
        )
        task = asyncio.create_task(self._run(key, loop), name=f"draft {key}")
        task.add_done_callback(lambda _: self._ended(verifier, key, session))  # also where it never got to run
        entry.start(loop, task)
        self._metrics.num_requests_running.set(self._num_attachments())
        log.info("attached", session_id=request.session_id, attachment_id=request.attachment_id)

    async def _new_session(self, request: AttachSession, seed: int | None) -> ProposerSession:
        creating = self._device.run(
            self._proposer.new_session,
            request.sampling,
            request.acceptance_rule,
            request.prompt_length,
            seed,
            request.sample_index,
        )
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:  # the caller is gone; what the device thread makes must not outlive it
            creating.add_done_callback(lambda done: self._device.run_and_forget(done.result().close))
            raise

    async def _run(self, key: AttachmentKey, loop: DraftLoop) -> None:
        """A session's loop to its end. What goes wrong in it is this session's alone."""
        session_id, attachment_id = key
        try:
            await loop.run()
        except PeerUnavailableError:
            log.info("verifier_lost", session_id=session_id, attachment_id=attachment_id)
        except Exception as error:
            log.error("proposer_failed", session_id=session_id, error=type(error).__name__, exc_info=error)

    def _ended(self, verifier: VerifierLink, key: AttachmentKey, session: ProposerSession) -> None:
        """Whatever ended a loop, the verifier is told and the session's cache freed."""
        verifier.leave(key)
        self._device.run_and_forget(session.close)
        self._metrics.num_requests_running.set(self._num_attachments())
        session_id, attachment_id = key
        log.info("detached", session_id=session_id, attachment_id=attachment_id)

    async def detach(self, session_id: SessionId, attachment_id: AttachmentId) -> bool:
        """Leaves a session. False where there is no such attachment."""
        key = (session_id, attachment_id)
        verifiers = [verifier for verifier in self._verifiers.values() if key in verifier.entries]
        for verifier in verifiers:
            await self._leave(verifier, key)
        return bool(verifiers)

    async def _leave_earlier_epochs(self, request: AttachSession) -> None:
        """What this drafter does for the session's earlier verifiers and owners is of no use once a later one asks."""
        for verifier in tuple(self._verifiers.values()):
            for key, entry in tuple(verifier.entries.items()):
                if entry.request.session_id == request.session_id and entry.request.epoch < request.epoch:
                    await self._leave(verifier, key)

    async def _leave(self, verifier: VerifierLink, key: AttachmentKey) -> None:
        entry = verifier.entries.get(key)
        if entry is None:
            return
        if entry.task is not None:
            await _end([entry.task])
        elif not entry.answered.done():
            entry.answered.set_exception(UnknownSessionError("left while joining"))
        else:
            verifier.leave(key)

    async def close(self) -> None:
        """Leaves every session and ends every stream."""
        self.draining = True
        tasks = []
        for verifier in self._verifiers.values():
            for key, entry in tuple(verifier.entries.items()):
                if entry.task is not None:
                    tasks.append(entry.task)
                elif not entry.answered.done():
                    entry.answered.set_exception(DrainingError("this drafter is being drained"))
                else:  # its proposer is being made ready
                    verifier.leave(key)
        await _end(tasks)
        await asyncio.gather(*(verifier.client.close() for verifier in self._verifiers.values()))

    def _verifier(self, endpoint: str) -> VerifierLink:
        """The link to a verifier. Those to verifiers that are gone, and were not asked for again, are forgotten."""
        if endpoint not in self._verifiers:
            self._verifiers = {known: link for known, link in self._verifiers.items() if link.is_alive}
            self._verifiers[endpoint] = VerifierLink(endpoint, self._wire, self._certificates)
        return self._verifiers[endpoint]

    def _num_attachments(self) -> int:
        return sum(len(verifier.entries) for verifier in self._verifiers.values())
