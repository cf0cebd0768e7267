"""Carries one session's commits to the store, in order, and keeps its lease.

Knows what the store's answers mean for an owner; knows nothing of clients, verifiers or text. Bounded: commits that
the store cannot take are forgotten past a limit, and a whole checkpoint takes their place when it is back.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from orchestrator.record import Checkpoint, CommittedRound
from orchestrator.session_store import Lease, SessionStore, WriteStatus
from specdec.errors import FencedError, StoreUnavailableError
from specdec.params import FinishReason

_QUEUE_LIMIT = 64
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_CLOSE_TIMEOUT_S = 2.0

_log = structlog.get_logger(__name__)


class RecordWriter:
    """`checkpoint` gives the session's whole state now; it is written first, and again whenever the store lost it."""

    def __init__(self, store: SessionStore, lease: Lease, checkpoint: Callable[[], Checkpoint]) -> None:
        self._store = store
        self._lease = lease
        self._checkpoint = checkpoint
        self._pending: deque[CommittedRound] = deque()
        self._needs_checkpoint = True
        self._was_written = False
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._is_renewal_due = False
        self._renewal: asyncio.TimerHandle | None = None

    def push(self, committed: CommittedRound) -> None:
        """Hands over a commit without waiting; `run` writes it."""
        if len(self._pending) >= _QUEUE_LIMIT:
            self._pending.clear()
            self._needs_checkpoint = True
        self._pending.append(committed)
        self._wake.set()

    async def flush(self, *, may_restore: bool = True) -> None:
        """Returns when the record holds everything that was pushed, or needs a checkpoint that may not be written.

        Raises:
            FencedError: another owner has the session, or the record has other tokens for a round of ours.
            StoreUnavailableError: the store does not answer. Nothing is forgotten.
        """
        async with self._lock:
            while self._needs_checkpoint or self._pending:
                if self._needs_checkpoint:
                    if not may_restore:
                        return
                    await self._write_checkpoint()
                else:
                    await self._write_commits(tuple(self._pending))

    async def run(self) -> None:
        """Writes what is pushed and renews the lease until cancelled; goes on through outages.

        Raises:
            FencedError: see `flush`.
        """
        self._expect_renewal()
        self._wake.set()
        try:
            await self._write_what_comes()
        finally:
            if self._renewal is not None:
                self._renewal.cancel()

    async def _write_what_comes(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
                if self._is_renewal_due:
                    await self._renew()
                    self._expect_renewal()
                backoff_s = _MIN_BACKOFF_S
            except StoreUnavailableError as error:
                _log.warning("record_not_written", session_id=self._lease.session_id, error=error.message)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                self._wake.set()

    async def close(self, finish_reason: FinishReason | None) -> None:
        """Writes what is left and gives the lease back, within a deadline; a store that is away is left alone.

        Of an output that has not ended nothing is restored: its client may have gone on elsewhere, and what the store
        forgot of that would look older than ours.
        """
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.flush(may_restore=finish_reason is not None or not self._was_written)
                await self._store.release(self._lease, finish_reason)
        except (StoreUnavailableError, FencedError, TimeoutError) as error:
            _log.warning("record_not_closed", session_id=self._lease.session_id, error=type(error).__name__)

    def _expect_renewal(self) -> None:
        """One timer for each renewal, not one for each commit."""
        interval_s = self._store.settings.renewal_interval_s
        self._is_renewal_due = False
        self._renewal = asyncio.get_running_loop().call_later(interval_s, self._ask_for_renewal)

    def _ask_for_renewal(self) -> None:
        self._is_renewal_due = True
        self._wake.set()

    async def _write_checkpoint(self) -> None:
        checkpoint = self._checkpoint()
        status = await self._store.restore(checkpoint)
        if status is WriteStatus.FENCED:
            raise FencedError("another owner has the session's record")
        self._needs_checkpoint, self._was_written = False, True
        while self._pending and self._pending[0].round <= checkpoint.round:
            self._pending.popleft()

    async def _write_commits(self, rounds: Sequence[CommittedRound]) -> None:
        """What is pushed while these are on their way travels together after them."""
        status = await self._store.commit(self._lease, *rounds)
        match status:
            case WriteStatus.OK | WriteStatus.DUPLICATE:
                for committed in rounds:
                    if self._pending and self._pending[0] is committed:  # else `push` gave up on the queue meanwhile
                        self._pending.popleft()
            case WriteStatus.LOST | WriteStatus.GAP:
                _log.info("record_restored", session_id=self._lease.session_id, because=status.value)
                self._needs_checkpoint = True
            case WriteStatus.FENCED | WriteStatus.CONFLICT:
                raise FencedError(f"the session's record answered {status.value}")

    async def _renew(self) -> None:
        async with self._lock:
            status = await self._store.renew(self._lease)
        if status is WriteStatus.FENCED:
            raise FencedError("another owner has the session's record")
        if status is WriteStatus.LOST:
            self._needs_checkpoint = True
            self._wake.set()
