"""Who may begin a stream at this orchestrator, decided before anything of it is claimed or opened.

Knows how many sessions there are, what their tenants may ask for, and what verifiers said of their queues; a request is
let in with all its sessions or told when to come again. Sessions that ran and are to go on have places of their own.
"""

import time
from collections.abc import Callable, Sequence

from orchestrator.endpoints import EndpointView
from orchestrator.shedding import require_room
from orchestrator.tenant_limits import StreamPace, TenantTable, TenantUse
from specdec.errors import InvalidParameterError, OverloadedError


class Slots:
    """The places of one request. Its tenant has them back when its stream has ended; the orchestrator when its sessions
    have, too, whose records are closed a moment later."""

    def __init__(
        self,
        use: TenantUse,
        clock: Callable[[], float],
        *,
        on_stream_ended: Callable[[], object],
        on_free: Callable[[], object],
    ) -> None:
        self._use = use
        self._clock = clock
        self._on_stream_ended = on_stream_ended
        self._on_free = on_free
        self._num_holders = 1

    def hold(self) -> None:
        """One session more has to give them back."""
        self._num_holders += 1

    def end_stream(self) -> None:
        """Once, when the client has all that it gets."""
        self._on_stream_ended()
        self.give_back()

    def give_back(self) -> None:
        """Of one who holds them."""
        self._num_holders -= 1
        if self._num_holders == 0:
            self._on_free()

    def charge(self, num_tokens: int) -> None:
        """Tokens that the tenant was sent."""
        self._use.charge(num_tokens, self._clock())


class Admission:
    """One object per orchestrator. `resume_reserve`: places beyond `max_sessions` that only Resume may take."""

    def __init__(
        self,
        tenants: TenantTable,
        verifiers: Callable[[], Sequence[EndpointView]],
        *,
        max_sessions: int,
        resume_reserve: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = tenants
        self._verifiers = verifiers
        self._max_sessions = max_sessions
        self._resume_reserve = resume_reserve
        self._clock = clock
        self._pace = StreamPace()
        self.num_sessions = 0
        """Sessions whose places are taken."""

    def admit(self, tenant: str, model: str, num_sessions: int, time_left_s: float | None) -> Slots:
        """Places for a new request; whoever has them ends the stream.

        Raises:
            InvalidParameterError: it asks for more samples than there are places.
            OverloadedError: this orchestrator is full, or each verifier's queue is full or longer than `time_left_s`.
            RateLimitedError, TooManyStreamsError: the tenant's share is used up.
        """
        if num_sessions > self._max_sessions:
            raise InvalidParameterError(f"num_samples: at most {self._max_sessions} here", field="num_samples")
        self._require_places(num_sessions, self._max_sessions)
        require_room(self._verifiers(), model, num_sessions, time_left_s, resumes=False)
        return self._take(tenant, num_sessions)

    def admit_resume(self, tenant: str, *, replaces_running: bool) -> Slots:
        """A place for a session that ran. `replaces_running`: it has one here, which is free soon.

        What a verifier's queue says comes later, when it is known which model the session needs: see `require_room`.

        Raises:
            OverloadedError, RateLimitedError, TooManyStreamsError: as `admit`.
        """
        num_ending = 1 if replaces_running else 0
        self._require_places(1 - num_ending, self._max_sessions + self._resume_reserve)
        return self._take(tenant, 1, resumes=True, num_ending=num_ending)

    def require_room(self, model: str, time_left_s: float | None) -> None:
        """Raises OverloadedError where a session that ran would only wait and fail."""
        require_room(self._verifiers(), model, 1, time_left_s, resumes=True)

    def _require_places(self, num_sessions: int, num_places: int) -> None:
        num_too_many = self.num_sessions + num_sessions - num_places
        if num_too_many > 0:
            retry_after_s = self._pace.until_ended(num_too_many, self.num_sessions)
            raise OverloadedError("the orchestrator has as many sessions as it may", retry_after_s=retry_after_s)

    def _take(self, tenant: str, num_sessions: int, *, resumes: bool = False, num_ending: int = 0) -> Slots:
        began_s = self._clock()
        use = self._tenants.use_of(tenant, began_s)
        use.begin(num_sessions, began_s, resumes=resumes, num_ending=num_ending)
        self.num_sessions += num_sessions

        def stream_ended() -> None:
            lasted_s = self._clock() - began_s
            self._pace.note(lasted_s)
            use.end(num_sessions, lasted_s)

        def free() -> None:
            self.num_sessions -= num_sessions

        return Slots(use, self._clock, on_stream_ended=stream_ended, on_free=free)
