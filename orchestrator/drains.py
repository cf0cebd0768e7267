"""Which servers are being emptied by an operator's order, here and at every orchestrator of the same store.

An order holds at once here; the store carries it to the others and over restarts. Where the store is this
orchestrator's own, or away, it is this orchestrator's alone; one that was given meanwhile is written when the store is
back. The orchestrator's own drain is never shared: replicas in containers listen at the same address. Knows no session
but by what it asks of `Sessions`.
"""

import asyncio

import structlog

from orchestrator.cluster import Cluster
from orchestrator.session_store import SessionStore
from orchestrator.sessions import Sessions
from specdec.errors import InvalidParameterError, StoreUnavailableError
from specdec.messages.cluster import DrainOrder, Role

_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class Drains:
    """`run` beside the servers; `own_endpoint` is set once the server is bound."""

    def __init__(self, cluster: Cluster, sessions: Sessions, store: SessionStore, *, shared: bool) -> None:
        """`shared`: other orchestrators may have the same store."""
        self._cluster = cluster
        self._sessions = sessions
        self._store = store
        self._recorded: frozenset[str] = frozenset()
        self._unwritten: dict[str, bool] = {}
        """Orders that the store has not taken yet; they go before what it says."""
        self.shared = shared
        self.own_endpoint = ""

    async def order(self, endpoint: str, *, drained: bool) -> DrainOrder:
        """Drains an endpoint, or takes that back. Raises InvalidParameterError for one that is not known here."""
        if endpoint == self.own_endpoint:
            self._sessions.drained = drained
            _log.info("drained" if drained else "undrained", endpoint=endpoint)
            return DrainOrder(shared=False, num_sessions=len(self._sessions.running))
        if all(view.endpoint != endpoint for view in (*self._cluster.verifiers, *self._cluster.drafters)):
            raise InvalidParameterError(f"no such endpoint: {endpoint}", field="endpoint")
        num_sessions = self._sessions.num_at(endpoint)  # before the order: the first may have left when it is written
        self._unwritten[endpoint] = drained
        self._enforce()
        await self._write()
        return DrainOrder(shared=self.shared and endpoint not in self._unwritten, num_sessions=num_sessions)

    async def refresh(self) -> None:
        """Takes what the store says, and acts on it."""
        await self._write()
        try:
            self._recorded = await self._store.read_drained()
        except StoreUnavailableError:
            _log.debug("drains_not_read")  # what was known stays; the store's health is told elsewhere
        self._enforce()

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(_INTERVAL_S)

    async def _write(self) -> None:
        for endpoint, drained in list(self._unwritten.items()):
            try:
                await self._store.set_drained(endpoint, drained=drained)
            except StoreUnavailableError:
                return
            self._recorded = self._recorded | {endpoint} if drained else self._recorded - {endpoint}
            if self._unwritten.get(endpoint) is drained:  # else another order came meanwhile
                del self._unwritten[endpoint]

    def _enforce(self) -> None:
        """Again and again: a session that was being opened when the order came is there only now."""
        wanted = self._recorded | {endpoint for endpoint, drained in self._unwritten.items() if drained}
        wanted -= {endpoint for endpoint, drained in self._unwritten.items() if not drained}
        for view in (*self._cluster.verifiers, *self._cluster.drafters):
            if view.drained != (view.endpoint in wanted):
                self._cluster.set_drained(view.endpoint, drained=view.endpoint in wanted)
            if view.endpoint in wanted and view.role is Role.DRAFTER:
                self._sessions.leave_drafter(view.endpoint)
