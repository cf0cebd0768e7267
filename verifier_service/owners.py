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
        self._spent: set[SessionId] = set()
        """Sessions whose last owner has had rounds here and is gone: its rounds are not numbered a second time."""

    def fencing_epoch(self, command: OpenSession) -> Epoch | None:
        """The epoch that forbids this owner to open the session, or None.

        It is a higher one, or its own with another nonce, or its own once rounds were committed in it: an open that
        comes twice must not give two results for one round.
        """
        epoch, nonce = self._owners.get(command.session_id, (Epoch(0), b""))
        is_another = command.owner_nonce != nonce or command.session_id in self._spent
        is_stale = command.epoch < epoch or (command.epoch == epoch and is_another)
        return epoch if is_stale else None

    def spend(self, session_id: SessionId) -> None:
        """The owner is gone, and rounds were committed for it."""
        if session_id in self._owners:
            self._spent.add(session_id)

    def remember(self, session_id: SessionId, epoch: Epoch, nonce: bytes, open_sessions: Collection[SessionId]) -> None:
        """This owner has the session. Owners of `open_sessions` are never forgotten."""
        self._owners[session_id] = (epoch, nonce)
        self._spent.discard(session_id)
        self._owners.move_to_end(session_id)
        while len(self._owners) > max(MAX_REMEMBERED_OWNERS, len(open_sessions)):
            oldest = next(iter(self._owners))
            if oldest in open_sessions:
                self._owners.move_to_end(oldest)
            else:
                del self._owners[oldest]
                self._spent.discard(oldest)
