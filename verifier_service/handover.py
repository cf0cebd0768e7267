"""What passes from one owner of a session to the next: the right to it, and the tokens that no record may have yet.

Knows owners' epochs and kept tokens; refuses to know what is open, streams and caches.
"""

from collections.abc import Callable, Collection

from specdec.ids import Epoch, SessionId
from specdec.messages import OpenSession
from specdec.params import FinishReason
from verifier_service.kept_tokens import Continuation, KeptTokens, chosen
from verifier_service.owners import Owners
from verifier_service.session import VerifierSession


class Handover:
    """Owners and kept tokens of all sessions that were here."""

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._owners = Owners()
        self._kept = KeptTokens(grace_s)
        self._clock = clock

    @property
    def num_kept(self) -> int:
        """Sessions whose tokens are kept."""
        return len(self._kept)

    def fencing_epoch(self, command: OpenSession) -> Epoch | None:
        """The epoch that forbids this owner to open the session, or None."""
        return self._owners.fencing_epoch(command)

    def take(self, session: VerifierSession, open_sessions: Collection[SessionId]) -> None:
        """The session's owner has it from now on."""
        self._owners.remember(session.session_id, session.epoch, session.owner_nonce, open_sessions)

    def leave(self, session: VerifierSession) -> None:
        """The session's owner is gone before its end: its tokens are kept, unless their log-probabilities were told
        with them and would be missing."""
        if session.spec.num_logprobs is None:
            self._kept.keep(
                session.session_id, session.identity, session.epoch, session.output_token_ids, self._clock()
            )

    def go_on(self, session: VerifierSession, command: OpenSession) -> FinishReason | None:
        """Lets a new session go on from what an earlier epoch decided, and says whether its output ended there."""
        if session.spec.num_logprobs is not None or session.is_scoring:
            return None  # nobody recorded log-probabilities
        recorded = Continuation(command.recorded_token_ids, command.recorded_epoch)
        kept = self._kept.find(session.session_id, session.identity, session.output_token_ids, self._clock())
        return session.go_on_from(chosen(recorded, kept))

    def opened(self, session: VerifierSession) -> None:
        """What was kept of the session is the new owner's, or of no use."""
        self._kept.discard(session.session_id)

    def end(self, session: VerifierSession) -> None:
        """The session is over, and its rounds are never numbered again."""
        if session.round > 0:
            self._owners.spend(session.session_id)

    def expire(self, now: float) -> None:
        """Forgets tokens that were kept for their time."""
        self._kept.expire(now)
