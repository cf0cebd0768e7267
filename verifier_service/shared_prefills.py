"""Prompts that begin alike and come at once are computed once: later ones wait until the first has computed the start.

The samples of one request, and users with one system prompt, arrive while nothing of it is in the cache yet. A session
follows another that is computing full blocks of their common beginning, and waits no longer than that: not once the
other is past it, has ended or was preempted. Knows token ids; refuses to know the cache's hashes.
"""

import dataclasses
from collections.abc import Sequence

from specdec.model.block_pool import BLOCK_SIZE
from verifier_service.session import VerifierSession

PromptStart = tuple[str, tuple[int, ...]]
"""A tenant and a first block: prompts without both in common have no block in common."""


@dataclasses.dataclass(frozen=True)
class _Following:
    leader: VerifierSession
    shared_length: int


class SharedPrefills:
    """The prompts that are being computed now, and who waits for them."""

    def __init__(self) -> None:
        self._running: dict[PromptStart, list[VerifierSession]] = {}
        self._starts: dict[VerifierSession, PromptStart] = {}
        self._following: dict[VerifierSession, _Following] = {}

    def begin(self, session: VerifierSession) -> None:
        """The session has blocks of its own and starts on its prompt; it waits for nobody."""
        self._following.pop(session, None)
        if (start := _start_of(session.token_ids, session.tenant)) is not None:
            self._running.setdefault(start, []).append(session)
            self._starts[session] = start

    def end(self, session: VerifierSession) -> None:
        """The session's prompt is computed, or never will be, or waits again."""
        self._following.pop(session, None)
        if (start := self._starts.pop(session, None)) is not None:
            self._running[start].remove(session)
            if not self._running[start]:
                del self._running[start]

    def must_wait(self, session: VerifierSession) -> bool:
        """Whether another session is computing the beginning of this one's tokens."""
        following = self._following.pop(session, None)
        if following is None or not self._is_ahead(following):
            following = self._find_leader(session)
        if following is None:
            return False
        self._following[session] = following
        return True

    def _is_ahead(self, following: _Following) -> bool:
        return following.leader in self._starts and following.leader.cache.length < following.shared_length

    def _find_leader(self, session: VerifierSession) -> _Following | None:
        wanted = session.adoptable_token_ids
        start = _start_of(wanted, session.tenant)
        for leader in self._running.get(start, ()) if start is not None else ():
            following = _Following(leader, _num_shared(leader.token_ids, wanted))
            if self._is_ahead(following):
                return following
        return None


def _start_of(token_ids: Sequence[int], tenant: str) -> PromptStart | None:
    return (tenant, tuple(token_ids[:BLOCK_SIZE])) if len(token_ids) > BLOCK_SIZE else None


def _num_shared(computed: Sequence[int], wanted: Sequence[int]) -> int:
    """Positions of the full blocks that both begin with. The last wanted token is computed in any case."""
    length, end = 0, min(len(computed), len(wanted) - 1)
    while length + BLOCK_SIZE <= end and computed[length : length + BLOCK_SIZE] == wanted[length : length + BLOCK_SIZE]:
        length += BLOCK_SIZE
    return length
