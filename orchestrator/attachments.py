"""Keep a drafter attached to one running session, as long as there is one to be had.

Knows which drafter is attached and which failed a moment ago. Runs beside the session's stream and never holds it up:
whatever goes wrong here costs speed alone.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from orchestrator.router import choose_drafter
from specdec.attach_key import attach_key
from specdec.errors import SpecdecError
from specdec.ids import AttachmentId, Epoch, SessionId
from specdec.messages import AttachmentChange, AttachmentState, AttachSession, DetachReason
from specdec.params import AcceptanceRule, GenerationSpec

_ATTACH_TIMEOUT_S = 40.0
"""Longer than a drafter takes to give up: a verifier answers between two forwards, and a prompt's may take seconds."""
_MIN_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 15.0
_STABLE_AFTER_S = 5.0
"""An attachment that lasted this long clears what was held against its drafter."""

_log = structlog.get_logger(__name__)


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


class DrafterKeeper:
    """`run` beside the session; `note` what the verifier says of its attachments."""

    def __init__(
        self,
        cluster: Cluster,
        facts: AttachFacts,
        known_token_ids: Callable[[], Sequence[int]],
        num_own_sessions: Callable[[], Mapping[str, int]],
    ) -> None:
        self._cluster = cluster
        self._num_own_sessions = num_own_sessions
        self._facts = facts
        self._known_token_ids = known_token_ids
        self._attachment_id = AttachmentId(0)
        self._over = asyncio.Event()
        self._session_ended = False
        self._not_before: dict[tuple[str, int], float] = {}
        self._backoff_s: dict[tuple[str, int], float] = {}
        self.drafter = ""
        """Endpoint of the drafter that is attached now, empty without one."""
        self.chosen = ""
        """The same, from when it was chosen: others choose at the same time, and it has not told of this session."""

    def note(self, change: AttachmentChange) -> None:
        """Only the newest attachment matters: a verifier tells the end of a replaced one too."""
        if change.attachment_id == self._attachment_id and change.state is not AttachmentState.ATTACHED:
            self._session_ended = change.detach_reason is DetachReason.SESSION_ENDED
            self._over.set()

    async def run(self) -> None:
        """Until the session has ended, or cancelled."""
        while not self._session_ended:
            change = self._cluster.next_change()
            drafter = choose_drafter(
                self._cluster.drafters,
                self._facts.tokenizer_fingerprint,
                excluded=self._resting(time.monotonic()),
                num_own_sessions=self._num_own_sessions(),
            )
            if drafter is None:
                await self._pause(change)
                continue
            lasted_s = 0.0
            self.chosen = drafter.endpoint
            try:
                await self._attach(drafter)
                began = time.monotonic()
                await self._over.wait()
                lasted_s = time.monotonic() - began
                _log.info("drafter_detached", session_id=self._facts.session_id, drafter=drafter.endpoint)
            except SpecdecError as error:
                fields = {"reason": error.reason, "error": error.message, **error.metadata}
                _log.warning(
                    "drafter_not_attached", session_id=self._facts.session_id, drafter=drafter.endpoint, **fields
                )
            finally:
                self.drafter = self.chosen = ""
            self._hold_against(drafter, lasted_s)

    async def _attach(self, drafter: EndpointView) -> None:
        facts = self._facts
        self._attachment_id = AttachmentId(self._attachment_id + 1)
        self._over.clear()
        request = AttachSession(
            session_id=facts.session_id,
            epoch=facts.epoch,
            verifier_endpoint=facts.verifier_endpoint,
            attachment_id=self._attachment_id,
            attach_key=attach_key(facts.attach_secret, self._attachment_id),
            sampling=dataclasses.replace(facts.spec.sampling, seed=None),
            speculation=facts.spec.speculation,
            known_token_ids=self._known_token_ids(),
            prompt_length=facts.prompt_length,
            acceptance_rule=facts.acceptance_rule,
            sample_index=facts.sample_index,
        )
        try:
            peer = self._cluster.drafter(drafter.endpoint)
        except KeyError:  # discovery dropped it a moment ago
            return self._over.set()
        await peer.attach_session(request, _ATTACH_TIMEOUT_S)
        self.drafter = drafter.endpoint
        _log.info("drafter_attached", session_id=facts.session_id, drafter=drafter.endpoint)
        return None

    async def _pause(self, change: asyncio.Event) -> None:
        """Until the cluster changes or a resting drafter may be tried again."""
        now = time.monotonic()
        rest_s = min((end - now for end in self._not_before.values() if end > now), default=_MAX_BACKOFF_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest_s):
                await change.wait()

    def _resting(self, now: float) -> set[str]:
        incarnations = {view.endpoint: view.incarnation for view in self._cluster.drafters}
        return {
            endpoint
            for (endpoint, incarnation), end in self._not_before.items()
            if end > now and incarnations.get(endpoint) == incarnation
        }

    def _hold_against(self, drafter: EndpointView, lasted_s: float) -> None:
        key = (drafter.endpoint, drafter.incarnation)
        if lasted_s > _STABLE_AFTER_S:
            self._backoff_s.pop(key, None)
        backoff_s = self._backoff_s.get(key, _MIN_BACKOFF_S)
        self._not_before[key] = time.monotonic() + backoff_s
        self._backoff_s[key] = min(2 * backoff_s, _MAX_BACKOFF_S)
