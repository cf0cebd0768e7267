"""One drafter's attachment to one session, from the call that asks for it until it is over. Chooses nothing."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence

from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from specdec.attach_key import attach_key
from specdec.errors import PeerUnavailableError, SpecdecError
from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import AttachmentChange, AttachmentState, AttachSession, DetachReason
from specdec.params import AcceptanceRule, GenerationSpec

_ATTACH_TIMEOUT_S = 40.0
"""Longer than a drafter takes to give up: a verifier answers between two forwards, and a prompt's may take seconds."""
_DETACH_TIMEOUT_S = 2.0


@dataclasses.dataclass(frozen=True)
class AttachFacts:
    """What a drafter is told of a session, and what proves it to the verifier."""

    session_id: SessionId
    epoch: Epoch
    attach_secret: bytes
    verifier_endpoint: str
    tokenizer_fingerprint: str
    spec: GenerationSpec
    acceptance_rule: AcceptanceRule
    prompt_length: int
    sample_index: int
    tenant: str = ""
    deadline: float | None = None
    """When the session's client gives up, by the monotonic clock. None: never."""

    @property
    def is_past_deadline(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


class AttachAttempt:
    """The call begins at once. `attached` is done when it has ended: a result where the drafter is attached, else the
    error; `over` is set when the verifier says that there is no such attachment any more."""

    def __init__(
        self,
        cluster: Cluster,
        facts: AttachFacts,
        drafter: EndpointView,
        attachment_id: AttachmentId,
        known_token_ids: Sequence[int],
    ) -> None:
        self._cluster = cluster
        self._facts = facts
        self.drafter = drafter
        self.attachment_id = attachment_id
        self.over = asyncio.Event()
        self.detach_reason: DetachReason | None = None
        self.began = time.monotonic()
        self.attached = asyncio.create_task(self._attach(known_token_ids), name=f"attach {attachment_id}")

    @property
    def age_s(self) -> float:
        """Since the call began."""
        return time.monotonic() - self.began

    @property
    def came_through(self) -> bool:
        return self.attached.done() and not self.attached.cancelled() and self.attached.exception() is None

    @property
    def was_replaced(self) -> bool:
        """A later attempt has its place at the verifier."""
        return self.detach_reason is DetachReason.REPLACED

    def note(self, change: AttachmentChange) -> None:
        """Takes what the verifier says of any attachment of the session."""
        if change.attachment_id == self.attachment_id and change.state is not AttachmentState.ATTACHED:
            self.detach_reason = change.detach_reason
            self.over.set()

    async def give_up(self) -> None:
        """Waits until the call, which is cancelled, has ended, and tells the drafter to leave: it may have joined."""
        self.attached.cancel()
        await asyncio.gather(self.attached, return_exceptions=True)
        with contextlib.suppress(SpecdecError, KeyError):
            peer = self._cluster.drafter(self.drafter.endpoint)
            await peer.detach_session(self._facts.session_id, self.attachment_id, _DETACH_TIMEOUT_S)

    async def _attach(self, known_token_ids: Sequence[int]) -> None:
        facts = self._facts
        request = AttachSession(
            session_id=facts.session_id,
            epoch=facts.epoch,
            verifier_endpoint=facts.verifier_endpoint,
            attachment_id=self.attachment_id,
            attach_key=attach_key(facts.attach_secret, self.attachment_id),
            sampling=dataclasses.replace(facts.spec.sampling, seed=None),
            speculation=facts.spec.speculation,
            known_token_ids=known_token_ids,
            prompt_length=facts.prompt_length,
            acceptance_rule=facts.acceptance_rule,
            sample_index=facts.sample_index,
        )
        try:
            peer = self._cluster.drafter(self.drafter.endpoint)
        except KeyError as error:
            raise PeerUnavailableError("the drafter is gone") from error
        time_left_s = _ATTACH_TIMEOUT_S if facts.deadline is None else facts.deadline - time.monotonic()
        await peer.attach_session(request, min(max(time_left_s, 0.0), _ATTACH_TIMEOUT_S))
