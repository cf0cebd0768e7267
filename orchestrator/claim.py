"""Claim a session in the store and open it at a verifier: everything before `Opened`.

Knows who may own a session and which verifier may take it; knows nothing of the stream that follows. A claim that a
verifier fences because it has seen a higher epoch claims again above that one; once opened, an owner never does.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import structlog

from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from orchestrator.router import choose_verifier
from orchestrator.samples import Placement
from orchestrator.session_store import AcquireStatus, SessionStore
from specdec.errors import (
    DrainingError,
    FencedError,
    LoadingError,
    NoVerifierError,
    OverloadedError,
    PeerUnavailableError,
    SessionExistsError,
    SpecdecError,
    StoreUnavailableError,
)
from specdec.ids import Epoch, SessionId
from specdec.messages import Fenced, Opened, OpenSession, SessionEvent
from specdec.params import GenerationSpec

_OPEN_TIMEOUT_S = 60.0
"""A verifier answers Opened at once, or when a waiting session's turn comes."""
_NUM_FENCED_CLAIMS = 5
_HELD_POLL_S = 0.25

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is to be opened.

    `committed_token_ids` (prompt and output) are those of a session that is resumed. `placement` is shared by the
    samples of one request: the first that is opened decides it, the others follow.
    """

    session_id: SessionId
    owner_nonce: bytes
    spec: GenerationSpec
    committed_token_ids: tuple[int, ...] = ()
    prompt_length: int = 0
    tenant: str = ""
    sample_index: int = 0
    placement: Placement | None = None

    @property
    def must_be_new(self) -> bool:
        return not self.committed_token_ids


@dataclasses.dataclass(frozen=True)
class OpenedSession:
    """A verifier's stream, its first event taken off. Whoever has it closes `events`."""

    verifier: EndpointView
    opened: Opened
    events: AsyncGenerator[SessionEvent, None]


class Claimant:
    """Takes one session from nothing to `Opened`."""

    def __init__(
        self,
        claim: Claim,
        cluster: Cluster,
        store: SessionStore,
        *,
        strict: bool,
        store_is_reachable: Callable[[], bool],
        num_own_sessions: Callable[[], Mapping[str, int]],
    ) -> None:
        self._claim = claim
        self._cluster = cluster
        self._store = store
        self._strict = strict
        self._store_is_reachable = store_is_reachable
        self._num_own_sessions = num_own_sessions
        self.epoch = Epoch(0)

    async def take(self) -> OpenedSession:
        """Claims the session and opens it; samples of one request go where the first of them was taken.

        Raises:
            SessionExistsError: a new session's id is in use.
            NoVerifierError, OverloadedError, UnknownModelError: no verifier takes the session.
            FencedError: somebody else keeps the session, or claims it too.
            StoreUnavailableError: strict, and the store does not answer.
            SpecdecError: what the verifier refused the request with.
        """
        spec, placement = self._claim.spec, self._claim.placement
        if placement is None:
            await self._acquire()
            return await self._open(spec)
        async with placement.deciding:  # before the record is claimed: what fails here leaves no names in use
            if placement.endpoint == "":
                await self._acquire()
                opening = await self._open(spec)
                placement.endpoint = opening.verifier.endpoint
                placement.prompt_token_ids = tuple(opening.opened.prompt_token_ids)
                return opening
        await self._acquire()
        return await self._open(dataclasses.replace(spec, prompt=placement.prompt_token_ids), placement.endpoint)

    async def _acquire(self, epoch_floor: int = 0) -> None:
        """Sets `epoch`. Relaxed and without a store, the lowest that may do: a verifier that knows better fences."""
        claim = self._claim
        give_up_at = time.monotonic() + self._store.settings.lease_s + 1.0
        while True:
            if not (self._strict or self._store_is_reachable()):
                return self._go_without_store(epoch_floor)
            try:
                reply = await self._store.acquire(
                    claim.session_id, claim.owner_nonce, epoch_floor=epoch_floor, must_be_new=claim.must_be_new
                )
            except StoreUnavailableError:
                if self._strict:
                    raise
                return self._go_without_store(epoch_floor)
            if reply.status is AcquireStatus.ACQUIRED:
                self.epoch = reply.epoch
                return None
            if claim.must_be_new:
                raise SessionExistsError("the session id is in use")
            if time.monotonic() >= give_up_at:  # its owner renews: it is not a dead one's lease
                raise FencedError("another orchestrator serves the session")
            await asyncio.sleep(min(reply.lease_remaining_s, _HELD_POLL_S))

    def _go_without_store(self, epoch_floor: int) -> None:
        self.epoch = Epoch(max(self.epoch, epoch_floor) + 1)
        _log.warning("claimed_without_store", session_id=self._claim.session_id, epoch=self.epoch)

    async def _open(self, spec: GenerationSpec, only_endpoint: str = "") -> OpenedSession:
        """Tries one verifier after another, or that one alone."""
        excluded: set[str] = set()
        last_refusal: SpecdecError | None = None
        num_fenced = 0
        while num_fenced < _NUM_FENCED_CLAIMS:
            try:
                verifier = choose_verifier(
                    [view for view in self._cluster.verifiers if only_endpoint in ("", view.endpoint)],
                    spec.model,
                    excluded=excluded,
                    num_own_sessions=self._num_own_sessions(),
                )
            except NoVerifierError as error:
                raise last_refusal if isinstance(last_refusal, OverloadedError) else error from last_refusal
            try:
                first, events = await self._first_event(verifier, spec)
            except (PeerUnavailableError, DrainingError, LoadingError, OverloadedError, TimeoutError) as error:
                last_refusal = error if isinstance(error, SpecdecError) else None
                fields = {"verifier": verifier.endpoint, "error": type(error).__name__}
                _log.warning("verifier_not_opened", session_id=self._claim.session_id, **fields)
                excluded.add(verifier.endpoint)
                continue
            if isinstance(first, Opened):
                return OpenedSession(verifier, first, events)
            num_fenced += 1
            await self._acquire(first.highest_epoch)
        raise FencedError("another owner claims the session too")

    async def _first_event(
        self, verifier: EndpointView, spec: GenerationSpec
    ) -> tuple[Opened | Fenced, AsyncGenerator[SessionEvent, None]]:
        claim = self._claim
        request = OpenSession(
            session_id=claim.session_id,
            epoch=self.epoch,
            owner_nonce=claim.owner_nonce,
            spec=spec,
            committed_token_ids=claim.committed_token_ids,
            prompt_length=claim.prompt_length,
            tenant=claim.tenant,
            sample_index=claim.sample_index,
        )
        try:
            peer = self._cluster.verifier(verifier.endpoint)
        except KeyError as error:
            raise PeerUnavailableError("the verifier is gone") from error
        async with contextlib.AsyncExitStack() as stack:
            events = await stack.enter_async_context(contextlib.aclosing(peer.open_session(request)))
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                first = await anext(events, None)
            if isinstance(first, Opened):
                stack.pop_all()
                return first, events
            if isinstance(first, Fenced):
                return first, events
            raise PeerUnavailableError("the verifier ended the session before it opened it")
