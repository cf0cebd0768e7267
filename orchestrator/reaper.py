"""Finds sessions whose owner is gone: frees claims that nobody opened, and shortens the life of what may be resumed.

The index of leases tells where to look, the record itself what is true. Any number of orchestrators may reap at once. A
bounded number of sessions each turn, and nothing that a stream waits for.
"""

import asyncio
from collections.abc import Callable

import structlog

from orchestrator.lease_index import NUM_SHARDS, DueSession
from orchestrator.session_store import ReapStatus, SessionStore
from specdec.errors import StoreUnavailableError

_MAX_PER_SHARD = 32
_PUT_OFF_S = 5.0
"""Another replica looks at a session that we took and did not settle after so long."""
_MIN_AGAIN_S = 0.1

_log = structlog.get_logger(__name__)


class Reaper:
    """`on_reaped` is told "freed" or "abandoned" for each."""

    def __init__(
        self, store: SessionStore, *, interval_s: float = 2.0, on_reaped: Callable[[str], None] = lambda what: None
    ) -> None:
        self._store = store
        self._interval_s = interval_s
        self._on_reaped = on_reaped

    async def run(self) -> None:
        """Until cancelled; goes on through outages."""
        while True:
            try:
                await self.turn()
            except StoreUnavailableError as error:
                _log.debug("not_reaped", error=error.message)
            await asyncio.sleep(self._interval_s)

    async def turn(self) -> int:
        """Looks at what is due, and tells how many sessions it found without an owner. Raises StoreUnavailableError."""
        return sum([await self._reap_shard(shard) for shard in range(NUM_SHARDS)])

    async def _reap_shard(self, shard: int) -> int:
        index = self._store.lease_index
        due = await index.due(shard, limit=_MAX_PER_SHARD, put_off_s=_PUT_OFF_S)
        if not due:
            return 0
        looked_at: list[tuple[DueSession, float | None]] = []
        num_reaped = 0
        replies = await asyncio.gather(*(self._store.reap(session.session_id) for session in due))
        for session, reply in zip(due, replies, strict=True):
            if reply.status is ReapStatus.LIVE:
                looked_at.append((session, max(reply.lease_remaining_s, _MIN_AGAIN_S)))
                continue
            looked_at.append((session, None))
            if reply.status in (ReapStatus.FREED, ReapStatus.ABANDONED):
                num_reaped += 1
                self._on_reaped(reply.status.value.lower())
        await index.settle(shard, looked_at)
        return num_reaped
