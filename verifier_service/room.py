"""Room for the rows of a step: blocks for all of them, or who gives way.

The eldest session is served first, a draft displaces nobody, and the youngest session that runs gives its blocks back
where one needs them more. Knows caches and seniority; refuses to know what rows are for.
"""

import logging
from collections.abc import Callable, Sequence

from specdec.model.block_pool import OutOfBlocksError
from verifier_service.admission import Admission
from verifier_service.drafters import Drafters
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SessionRows
from verifier_service.session import VerifierSession

log = logging.getLogger(__name__)


class Room:
    """Makes room for one step after the other. `fail` ends a session whose cache is broken."""

    def __init__(
        self,
        admission: Admission,
        drafters: Drafters,
        observer: EngineObserver,
        fail: Callable[[VerifierSession], None],
    ) -> None:
        self._admission = admission
        self._drafters = drafters
        self._observer = observer
        self._fail = fail

    def make(self, rows: Sequence[SessionRows]) -> list[SessionRows]:
        """Reserves blocks for the rows, the eldest session first. Sessions that have to give way have no rows."""
        ready: dict[VerifierSession, SessionRows] = {}
        for planned in sorted(rows, key=lambda planned: planned.session.arrival):
            if self._admission.active.get(planned.session.session_id) is not planned.session:
                continue
            reserved = self._reserve(planned, ready)
            if reserved is not None:
                ready[planned.session] = reserved
        return [ready[planned.session] for planned in rows if planned.session in ready]

    def _reserve(self, planned: SessionRows, ready: dict[VerifierSession, SessionRows]) -> SessionRows | None:
        """The rows with blocks for them; without their draft where it does not fit, since a guess displaces nobody."""
        session = planned.session
        while True:
            try:
                session.cache.reserve(session.cache.length + planned.num_rows)
                return planned
            except OutOfBlocksError:
                if planned.draft.token_ids:
                    planned = planned.with_draft_cut(0)
                    continue
                youngest = self._admission.youngest
                ready.pop(youngest, None)
                self._preempt(youngest)
                if youngest is session:
                    return None
            except Exception:
                log.exception("no room for a session's cache", extra={"session_id": session.session_id})
                self._fail(session)
                return None

    def _preempt(self, session: VerifierSession) -> None:
        self._admission.preempt(session)
        session.draft_budget = 0
        self._drafters.tell_budget(session)
        self._observer.preempted()
