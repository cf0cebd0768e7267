"""Whether the session store answers, asked once a second. Lets a stream start at once while the store is away."""

import asyncio

import structlog

from orchestrator.session_store import SessionStore

_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class StoreHealth:
    """Reachable until the first look says otherwise."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.reachable = True

    async def run(self) -> None:
        while True:
            reachable = await self._store.is_reachable()
            if reachable != self.reachable:
                _log.warning("store_back" if reachable else "store_away")
            self.reachable = reachable
            await asyncio.sleep(_INTERVAL_S)
