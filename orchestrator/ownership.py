"""Who owns a session: the lease in the store and the epoch that fences everybody else.

Knows how an owner claims a session, goes on in a higher epoch and keeps its lease while no verifier serves it; knows
nothing of verifiers. Relaxed, it goes on without a store: a verifier that knows a higher epoch fences it then.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import structlog

from orchestrator.claim import Claim
from orchestrator.progress import Progress
from orchestrator.session_store import AcquireStatus, Lease, SessionStore, WriteStatus
from specdec.errors import FencedError, SessionExistsError, StoreUnavailableError
from specdec.ids import Epoch
from specdec.messages import Fenced

_log = structlog.get_logger(__name__)


class Ownership:
    """Of one session by one owner nonce. Every new epoch is entered in `progress` before the call returns."""

    def __init__(
        self,
        claim: Claim,
        progress: Progress,
        store: SessionStore,
        *,
        strict: bool,
        store_is_reachable: Callable[[], bool],
    ) -> None:
        self._claim = claim
        self._progress = progress
        self._store = store
        self._strict = strict
        self._store_is_reachable = store_is_reachable
        self._lock = asyncio.Lock()
        """A renewal that is overtaken by a new epoch of ours would be told that it is fenced."""

    @property
    def epoch(self) -> Epoch:
        """0 before the first claim."""
        return self._progress.session.epoch

    @property
    def lease(self) -> Lease:
        return Lease(self._claim.session_id, self.epoch, self._claim.owner_nonce)

    async def next_epoch(self, floor: int = 0) -> None:
        """Claims the session, or, once a verifier has taken it, goes on with it in a higher epoch.

        Raises:
            SessionExistsError: a new session's id is in use.
            FencedError: another owner has taken the session since.
            StoreUnavailableError: strict, and the store does not answer.
        """
        # Ours tells a second claim from the first one that comes late. The record's was read: what it decided is older.
        floor = max(floor, self.epoch, self._claim.recorded_epoch)
        if not (self._strict or self._store_is_reachable()):
            return self._go_without_store(floor)
        try:
            if self._progress.was_opened:
                await self._bump()
            else:
                await self._acquire(floor)
        except StoreUnavailableError:
            if self._strict:
                raise
            self._go_without_store(floor)
        return None

    @contextlib.asynccontextmanager
    async def kept(self, on_fenced: Callable[[], object]) -> AsyncIterator[None]:
        """The lease is renewed meanwhile: no record's writer does it before a verifier has the session."""
        renewing = asyncio.create_task(self._renew(on_fenced))
        try:
            yield
        finally:
            renewing.cancel()  # not awaited: who fails tells it before others that wait for the same go on

    async def _acquire(self, floor: int) -> None:
        claim = self._claim
        async with self._lock:
            reply = await self._store.acquire(
                claim.session_id,
                claim.owner_nonce,
                epoch_floor=floor,
                must_be_new=claim.must_be_new,
                tenant=claim.tenant,
            )
            if reply.status is AcquireStatus.EXISTS:
                raise SessionExistsError("the session id is in use")
            self._progress.enter_epoch(reply.epoch)

    async def _bump(self) -> None:
        async with self._lock:
            reply = await self._store.bump(self.lease)
            if reply.status is WriteStatus.FENCED:
                self._progress.apply(Fenced(reply.epoch))
                raise FencedError("another owner has the session's record")
            # The store may have forgotten epochs of ours; what it kept of it is written anew under this one.
            self._progress.enter_epoch(Epoch(max(reply.epoch, self.epoch + 1)))

    def _go_without_store(self, floor: int) -> None:
        """The lowest epoch that may do."""
        self._progress.enter_epoch(Epoch(max(self.epoch, floor) + 1))
        _log.warning("claimed_without_store", session_id=self._claim.session_id, epoch=self.epoch)

    async def _renew(self, on_fenced: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(self._store.settings.renewal_interval_s)
            if self.epoch == 0 or not self._store_is_reachable():
                continue
            async with self._lock:
                with contextlib.suppress(StoreUnavailableError):
                    if await self._store.renew(self.lease) is WriteStatus.FENCED:
                        on_fenced()
                        return
