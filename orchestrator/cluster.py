"""What the orchestrator knows of the servers around it, kept fresh by asking each one again and again.

Knows health, status and drains; chooses nothing (see router.py) and carries no session.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping

import structlog

from orchestrator.breaker import Outcome, outcome_of
from orchestrator.circuits import Circuits
from orchestrator.discovery import Addresses, Discovery
from orchestrator.endpoints import EndpointView
from orchestrator.peers import DrafterPeer, Peer, VerifierPeer
from specdec.config import WireSettings
from specdec.errors import DeadlineError, InvalidParameterError, SpecdecError
from specdec.messages.cluster import Role
from specdec.wire.certificates import CertificateFiles

_CALL_TIMEOUT_S = 1.0
_LATE_ANSWERS_UNTIL_UNHEALTHY = 3
"""In a row: one late answer on a busy machine tells little. A server that cannot be reached is unhealthy at once."""
_UNHEALTHY_INTERVAL_S = 0.25
"""A server that is not there yet is looked for more often: a drafter that comes up serves within a second."""

_log = structlog.get_logger(__name__)


class Cluster:
    """The view and the connections behind it. `run` keeps both until it is cancelled."""

    def __init__(
        self,
        discovery: Discovery,
        *,
        interval_s: float,
        wire: WireSettings,
        certificates: CertificateFiles | None = None,
    ) -> None:
        self._discovery = discovery
        self._interval_s = interval_s
        self._wire = wire
        self._certificates = certificates
        self._views: dict[str, EndpointView] = {}
        self._peers: dict[str, Peer] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._num_late: dict[str, int] = {}
        self._suspected: set[str] = set()
        self._look_now: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._circuits = Circuits()

    @property
    def verifiers(self) -> tuple[EndpointView, ...]:
        return self._views_of(Role.VERIFIER)

    @property
    def drafters(self) -> tuple[EndpointView, ...]:
        return self._views_of(Role.DRAFTER)

    def _views_of(self, role: Role) -> tuple[EndpointView, ...]:
        now = time.monotonic()
        return tuple(
            dataclasses.replace(view, circuit=self._circuits.state(view.endpoint, now))
            for view in self._views.values()
            if view.role is role
        )

    def verifier(self, endpoint: str) -> VerifierPeer:
        peer = self._peers[endpoint]
        if not isinstance(peer, VerifierPeer):
            raise KeyError(endpoint)
        return peer

    def drafter(self, endpoint: str) -> DrafterPeer:
        peer = self._peers[endpoint]
        if not isinstance(peer, DrafterPeer):
            raise KeyError(endpoint)
        return peer

    def next_change(self) -> asyncio.Event:
        """Is set at the next change of any server's health, drain or circuit. Take it before looking at the views."""
        return self._changed

    def report(self, view: EndpointView, outcome: Outcome | BaseException, *, towards: str = "") -> None:
        """Takes what came of using a server, or the error that it ended with; of a drafter, towards which verifier.

        What is told of an earlier incarnation, or of a server that is gone, counts for nothing.
        """
        now = self._views.get(view.endpoint)
        if now is None or now.incarnation != view.incarnation:
            return
        rest_s = 0.0
        if isinstance(outcome, BaseException):
            error, outcome = outcome, outcome_of(outcome)
            rest_s = (isinstance(error, SpecdecError) and error.retry_after_s) or 0.0
            if outcome is Outcome.FAILED:
                reason = error.reason if isinstance(error, SpecdecError) else DeadlineError.reason
                self._views[view.endpoint] = dataclasses.replace(now, last_error=reason)
        if self._circuits.note(view.endpoint, towards, outcome, time.monotonic(), rest_s=rest_s) and (
            outcome is not Outcome.TRIED
        ):
            state = self._circuits.state(view.endpoint, time.monotonic())
            _log.info("circuit_changed", endpoint=view.endpoint, towards=towards, state=state.value)
            self._announce_change()

    def suspect(self, view: EndpointView) -> None:
        """A connection to it broke: it takes no sessions until it has answered a look that begins after this, which is
        at once. If it answers it is the same incarnation as before."""
        now = self._views.get(view.endpoint)
        if now is None or now.incarnation != view.incarnation or not now.healthy:
            return
        self._suspected.add(view.endpoint)
        self._look_now[view.endpoint].set()
        self._replace(dataclasses.replace(now, healthy=False))

    def note_draining(self, view: EndpointView) -> None:
        """It said so to a session; the next look may be a while away."""
        now = self._views.get(view.endpoint)
        if now is not None and now.incarnation == view.incarnation and now.status is not None:
            self._replace(dataclasses.replace(now, status=dataclasses.replace(now.status, draining=True)))

    def resting(self, *, towards: str = "") -> Mapping[str, float]:
        """Servers whose circuit lets nobody through now (drafters: towards that verifier), and for how long at most."""
        return self._circuits.resting(towards, time.monotonic())

    def is_drained(self, endpoint: str) -> bool:
        """By an operator's order; False of one that is not known."""
        view = self._views.get(endpoint)
        return view is not None and view.drained

    def set_drained(self, endpoint: str, *, drained: bool) -> None:
        """Raises InvalidParameterError for an endpoint that is not known."""
        if endpoint not in self._views:
            raise InvalidParameterError("no such endpoint", field="endpoint")
        self._replace(dataclasses.replace(self._views[endpoint], drained=drained))
        _log.info("drained" if drained else "undrained", endpoint=endpoint)

    async def run(self) -> None:
        try:
            async for addresses in self._discovery.watch():
                await self._follow(addresses)
            await asyncio.gather(*self._watches.values())
        finally:
            await self._follow(Addresses((), ()))

    async def _follow(self, addresses: Addresses) -> None:
        wanted: dict[str, type[VerifierPeer] | type[DrafterPeer]] = {}
        wanted |= dict.fromkeys(addresses.drafters, DrafterPeer)
        wanted |= dict.fromkeys(addresses.verifiers, VerifierPeer)
        for endpoint in self._views.keys() - wanted.keys():
            await self._forget(endpoint)
        for endpoint, peer_class in wanted.items():
            if endpoint not in self._views:
                self._views[endpoint] = EndpointView(endpoint, peer_class.role)
                self._peers[endpoint] = peer_class(endpoint, self._wire, self._certificates)
                self._look_now[endpoint] = asyncio.Event()
                self._watches[endpoint] = asyncio.create_task(self._watch(endpoint), name=f"watch {endpoint}")

    async def _forget(self, endpoint: str) -> None:
        watch = self._watches.pop(endpoint)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        await self._peers.pop(endpoint).close()
        del self._views[endpoint]
        self._circuits.forget(endpoint)
        self._num_late.pop(endpoint, None)
        self._suspected.discard(endpoint)
        del self._look_now[endpoint]

    async def _watch(self, endpoint: str) -> None:
        while True:
            self._look_now[endpoint].clear()
            view = await self._look(endpoint)
            self._replace(view)
            interval_s = self._interval_s if view.healthy else min(self._interval_s, _UNHEALTHY_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._look_now[endpoint].wait()

    async def _look(self, endpoint: str) -> EndpointView:
        peer = self._peers[endpoint]
        was_suspected = endpoint in self._suspected
        self._suspected.discard(endpoint)
        healthy, status, round_trip_time_s = False, None, None
        was_late, last_error = False, ""
        try:
            healthy = await peer.is_serving(_CALL_TIMEOUT_S)
            began = time.monotonic()
            # Also of a server that is still loading: it has something to tell.
            status = await peer.get_status(_CALL_TIMEOUT_S)
            round_trip_time_s = time.monotonic() - began
        except DeadlineError:
            was_late = True
        except SpecdecError as error:
            healthy, last_error = False, error.reason
        self._num_late[endpoint] = self._num_late.get(endpoint, 0) + 1 if was_late else 0
        before = self._views[endpoint]  # looked up after the calls: a drain may have come meanwhile
        if was_late:
            healthy = before.healthy and self._num_late[endpoint] < _LATE_ANSWERS_UNTIL_UNHEALTHY
        if endpoint in self._suspected:  # it answered before its connection broke
            healthy = False
        return dataclasses.replace(
            before,
            healthy=healthy,
            status=status or before.status,
            round_trip_time_s=round_trip_time_s,
            last_error=last_error or before.last_error,
            incarnation=before.incarnation + (healthy and not before.healthy and not was_suspected),
        )

    def _replace(self, view: EndpointView) -> None:
        before = self._views[view.endpoint]
        if before.incarnation != view.incarnation:
            self._circuits.forget(view.endpoint)
            view = dataclasses.replace(view, last_error="")
        self._views[view.endpoint] = view
        if before.healthy != view.healthy:
            _log.info("endpoint_healthy" if view.healthy else "endpoint_unhealthy", endpoint=view.endpoint)
        if before.takes_sessions != view.takes_sessions or before.incarnation != view.incarnation:
            self._announce_change()

    def _announce_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
