"""Which sessions hold blocks of the cache, and which wait for them.

A session is admitted when its committed tokens and a round fit what is free, and leaves enough for those that run to
grow. Then it holds all those blocks. The order is fair between tenants, and first come first served within one;
preempted sessions come before all others. When a running session finds no block, the youngest gives all of its own back
and waits: since seniority is kept for life, the oldest session always advances. Knows no clock, no drafter and no
forward.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator

from specdec.ids import SessionId
from specdec.model.block_pool import BlockPool, OutOfBlocksError
from verifier_service.fairness import TenantShares
from verifier_service.session import VerifierSession
from verifier_service.shared_prefills import SharedPrefills

WATERMARK_SHARE = 100
"""One block in so many stays free at an admission, and one for each running session at least."""
MIN_RETRY_S, MAX_RETRY_S = 0.5, 60.0
ADMISSION_GAIN = 0.1


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """How much the engine takes on: sessions that hold blocks, sessions that wait for some, the output limit of
    requests that give none, whether prompts that begin alike share blocks, how long the tokens of a session are kept
    whose owner's stream broke, and how many attachments one drafter's stream may have."""

    max_sessions: int
    max_waiting_sessions: int
    default_max_new_tokens: int
    prefix_caching: bool = True
    kept_tokens_grace_s: float = 0.0
    max_attachments_per_stream: int = 1024


class Admission:
    """The running and the waiting sessions. A session is in one of both from `enter` to `remove`."""

    def __init__(self, pool: BlockPool, shares: TenantShares, limits: EngineLimits) -> None:
        self._pool = pool
        self._shares = shares
        self._limits = limits
        self._prefills = SharedPrefills()
        self.active: dict[SessionId, VerifierSession] = {}
        self._preempted: list[VerifierSession] = []
        self._waiting: dict[str, deque[VerifierSession]] = {}
        self._num_waiting = 0
        self._refused: tuple[VerifierSession, int] | None = None
        self._last_admission_at: float | None = None
        self._admission_interval_s = 1.0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + len(self._preempted)

    @property
    def max_waiting(self) -> int:
        return self._limits.max_waiting_sessions

    @property
    def queue_wait_s(self) -> float:
        """How long one that came now would wait for its turn, at the pace of the last admissions."""
        return self._admission_interval_s * self.num_waiting

    @property
    def waiting(self) -> list[VerifierSession]:
        """All sessions that wait, in no particular order."""
        return [*self._preempted, *(session for queue in self._waiting.values() for session in queue)]

    def enter(self, session: VerifierSession) -> None:
        """A new session waits for its turn, which may come with the next `admit`."""
        self._shares.join(session.tenant)
        self._waiting.setdefault(session.tenant, deque()).append(session)
        self._num_waiting += 1

    def remove(self, session: VerifierSession) -> None:
        """The session is over: its blocks are free."""
        if self.active.pop(session.session_id, None) is None:
            self._unqueue(session)
        self._prefills.end(session)
        session.cache.free()
        self._shares.leave(session.tenant)

    def admit(self, now: float) -> list[VerifierSession]:
        """Gives blocks to as many waiting sessions as may run, and returns those."""
        admitted: list[VerifierSession] = []
        if self.num_waiting == 0 or len(self.active) >= self._limits.max_sessions:
            return admitted
        for session in self._in_order():
            if len(self.active) >= self._limits.max_sessions or not self._take_blocks(session):
                break
            self._unqueue(session)
            self.active[session.session_id] = session
            admitted.append(session)
            self._note_admission(now)
            if session.num_uncached > 1:
                self._prefills.begin(session)
        return admitted

    def preempt(self, session: VerifierSession) -> None:
        """Takes a running session's blocks, for it to be computed again later."""
        del self.active[session.session_id]
        self._prefills.end(session)
        session.cache.free()
        self._preempted.append(session)
        self._preempted.sort(key=lambda one: one.arrival)

    @property
    def youngest(self) -> VerifierSession:
        """The running session that gives way to all others. Raises ValueError where none runs."""
        return max(self.active.values(), key=lambda session: session.arrival)

    def publish(self, session: VerifierSession) -> None:
        """What the session has computed may be used by others of its tenant from now on."""
        if self._limits.prefix_caching:
            session.cache.publish(session.token_ids)
            if session.num_uncached <= 1:
                self._prefills.end(session)

    @property
    def one_too_many(self) -> VerifierSession:
        """Who is turned away where too many wait: the last to come of the tenant that has most waiting, so that nobody
        fills the queue for others. Not who was preempted. Raises ValueError where nobody else waits."""
        return max(self._waiting.values(), key=lambda queue: (len(queue), queue[-1].arrival))[-1]

    def retry_after_s(self) -> float:
        """When one that found the queue full may come again: once a tenth of the queue will have been admitted."""
        wait_s = self._admission_interval_s * (1 + self.num_waiting / 10)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))

    def _in_order(self) -> Iterator[VerifierSession]:
        yield from list(self._preempted)
        queues = {tenant: self._may_run(queue) for tenant, queue in self._waiting.items()}
        yield from self._shares.by_turns(queues, lambda session: session.num_uncached)

    def _may_run(self, queue: deque[VerifierSession]) -> Iterator[VerifierSession]:
        for session in list(queue):
            if not (self._limits.prefix_caching and self._prefills.must_wait(session)):
                yield session

    def _take_blocks(self, session: VerifierSession) -> bool:
        """Whether the session now has blocks for its committed tokens and one more, found in the cache or its own."""
        num_free = self._pool.num_free_blocks
        if self.active and self._refused is not None and self._refused[0] is session and num_free <= self._refused[1]:
            return False  # nothing has become free since
        cache = session.cache
        try:
            if self._limits.prefix_caching:
                cache.adopt_prefix(session.adoptable_token_ids)
            cache.reserve(min(session.committed_length + 1, cache.context_limit))
            has_room = not self.active or self._pool.num_free_blocks >= self._watermark()
        except OutOfBlocksError:
            has_room = False
        if not has_room:
            cache.free()
            self._refused = (session, num_free)
            return False
        self._refused = None
        if not session.was_admitted:
            session.was_admitted = True
            session.num_cached_prompt_tokens = min(cache.length, session.prompt_length)
        return True

    def _watermark(self) -> int:
        return max(len(self.active), self._pool.num_blocks // WATERMARK_SHARE)

    def _unqueue(self, session: VerifierSession) -> None:
        if session in self._preempted:
            self._preempted.remove(session)
            return
        queue = self._waiting[session.tenant]
        queue.remove(session)
        self._num_waiting -= 1
        if not queue:
            del self._waiting[session.tenant]

    def _note_admission(self, now: float) -> None:
        if self._last_admission_at is not None:
            interval_s = now - self._last_admission_at
            self._admission_interval_s += ADMISSION_GAIN * (interval_s - self._admission_interval_s)
        self._last_admission_at = now if self.num_waiting else None  # an empty queue drains at no rate
