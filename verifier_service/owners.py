"""Who owns which session: the highest epoch seen of each and its nonce, so that a stale owner is fenced.

Outlives the sessions, within bounds. Knows epochs, no tokens.
"""

from collections import OrderedDict
from collections.abc import Collection

from specdec.ids import Epoch, SessionId
from specdec.messages import OpenSession

MAX_REMEMBERED_OWNERS = 65_536


class Owners:
    """Remembers the owners of sessions that were opened, the least recently opened ones forgotten first."""

    def __init__(self) -> None:
        self._owners: OrderedDict[SessionId, tuple[Epoch, bytes]] = OrderedDict()

    def fencing_epoch(self, command: OpenSession) -> Epoch | None:
        """The epoch that forbids this owner to open the session, or None: a higher one, or its own with other nonce."""
        epoch, nonce = self._owners.get(command.session_id, (Epoch(0), b""))
        is_stale = command.epoch < epoch or (command.epoch == epoch and command.owner_nonce != nonce)
        return epoch if is_stale else None

    def remember(self, session_id: SessionId, epoch: Epoch, nonce: bytes, open_sessions: Collection[SessionId]) -> None:
        """This owner has the session. Owners of `open_sessions` are never forgotten."""
        self._owners[session_id] = (epoch, nonce)
        self._owners.move_to_end(session_id)
        while len(self._owners) > max(MAX_REMEMBERED_OWNERS, len(open_sessions)):
            oldest = next(iter(self._owners))
            if oldest in open_sessions:
                self._owners.move_to_end(oldest)
            else:
                del self._owners[oldest]
