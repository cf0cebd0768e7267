"""Keep a drafter attached to one running session, as long as there is one to be had.

Knows which drafter is attached and which will not do for this session; which ones fail is known for all sessions
together (see breaker.py). Where an attach takes longer than most, a second drafter is tried beside the first. Runs
beside the session's stream and never holds it up: whatever goes wrong here costs speed alone.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog

from orchestrator.attach_attempt import AttachAttempt, AttachFacts
from orchestrator.breaker import Outcome, outcome_of
from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from orchestrator.routing import Routing
from specdec.errors import AttachRefusedError, DeadlineError, OverloadedError, PeerUnavailableError, SpecdecError
from specdec.ids import AttachmentId
from specdec.messages import AttachmentChange, AttachRefusal, DetachReason

_STABLE_AFTER_S = 5.0
"""An attachment that lasted this long went well, however it ended."""
_MAX_PAUSE_S = 15.0
_REFUSED_PAUSE_S = 0.25
_MAX_REFUSALS = 3
"""Then a drafter will not do for this session, whatever the reason: no other session is to notice."""
_REFUSALS = frozenset(refusal.value for refusal in AttachRefusal)
_MISFITS = frozenset(
    {
        AttachRefusal.TOKENIZER_MISMATCH.value,
        AttachRefusal.VOCABULARY_MISMATCH.value,
        AttachRefusal.CONTEXT_TOO_SHORT.value,
        AttachRefusal.PROTOCOL_VERSION.value,
        AttachRefusal.NO_HIDDEN_STATES.value,
    }
)
"""Refusals that will be the same the next time."""
_NOT_THE_DRAFTERS_FAULT = frozenset({DetachReason.SESSION_ENDED, DetachReason.REPLACED, DetachReason.REQUESTED})

_log = structlog.get_logger(__name__)


class DrafterKeeper:
    """`run` beside the session; `note` what the verifier says of its attachments."""

    def __init__(
        self,
        cluster: Cluster,
        routing: Routing,
        facts: AttachFacts,
        known_token_ids: Callable[[], Sequence[int]],
        num_own_sessions: Callable[[], Mapping[str, int]],
        attachment_ids: Iterator[int],
    ) -> None:
        """`attachment_ids` increase, over the session's earlier verifiers too: a call that comes late is no later
        attachment's."""
        self._cluster = cluster
        self._routing = routing
        self._num_own_sessions = num_own_sessions
        self._facts = facts
        self._known_token_ids = known_token_ids
        self._attachment_ids = attachment_ids
        self._attempts: list[AttachAttempt] = []
        """One or two that are under way, or the one that is attached."""
        self._leaving: set[asyncio.Task[None]] = set()
        self._session_ended = False
        self._num_refusals: Counter[tuple[str, int]] = Counter()
        self.drafter = ""
        """Endpoint of the drafter that is attached now, empty without one."""

    @property
    def chosen(self) -> str:
        """The same, from when it was chosen: others choose at the same time, and it has not told of this session."""
        return self._attempts[0].drafter.endpoint if self._attempts else ""

    def note(self, change: AttachmentChange) -> None:
        """Takes what the verifier says. Of attachments that were given up nothing matters, except why."""
        self._session_ended |= change.detach_reason is DetachReason.SESSION_ENDED
        for attempt in self._attempts:
            attempt.note(change)

    def leave(self, drafter: str) -> None:
        """It is to be empty: where it is attached, it is told to go, and another takes its place."""
        for attempt in self._attempts:
            if attempt.drafter.endpoint == drafter == self.drafter and not self._leaving:
                self._tell_to_leave(attempt)

    async def run(self) -> None:
        """Until the session has ended, or cancelled."""
        try:
            while not self._session_ended:
                change = self._cluster.next_change()
                drafter = self._choose()
                if drafter is None:
                    await self._pause(change)
                elif (attached := await self._attach(drafter)) is not None:
                    await self._stay(attached)
        finally:
            # The verifier ends what is attached with the session.
            for task in (*self._leaving, *(attempt.attached for attempt in self._attempts)):
                task.cancel()

    def _choose(self, besides: str = "") -> EndpointView | None:
        drafters = self._cluster.drafters
        unfit = {
            view.endpoint
            for view in drafters
            if self._num_refusals[view.endpoint, view.incarnation] >= _MAX_REFUSALS or view.endpoint == besides
        }
        return self._routing.choose_drafter(
            drafters,
            self._facts.tokenizer_fingerprint,
            verifier=self._facts.verifier_endpoint,
            tenant=self._facts.tenant,
            excluded=unfit | self._cluster.resting(towards=self._facts.verifier_endpoint).keys(),
            num_own_sessions=self._num_own_sessions(),
        )

    async def _attach(self, drafter: EndpointView) -> AttachAttempt | None:
        """The attachment that came through first, None where none did. At most two are tried at a time.

        A valid higher id replaces the lower one at the verifier, so that two never draft for one session; the one that
        is not kept is told to leave, for its call may have come through all the same.
        """
        verifier = self._facts.verifier_endpoint
        kept: AttachAttempt | None = None
        first = self._try(drafter)
        try:
            await asyncio.wait({first.attached}, timeout=self._routing.hedge_delay_s(verifier))
            if not first.attached.done() and (second := self._choose(besides=drafter.endpoint)) is not None:
                _log.info("attach_hedged", session_id=self._facts.session_id, drafter=second.endpoint)
                self._try(second)
            while kept is None and (waiting := {a.attached for a in self._attempts}):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                ended = [attempt for attempt in self._attempts if attempt.attached.done()]
                through = [attempt for attempt in ended if attempt.came_through and not attempt.was_replaced]
                kept = max(through, key=lambda attempt: attempt.attachment_id, default=None)
                for attempt in [a for a in ended if a not in through]:
                    self._attempts.remove(attempt)
                    await self._take_failure(attempt)
        finally:
            for attempt in [a for a in self._attempts if a is not kept]:
                self._attempts.remove(attempt)
                self._give_up(attempt, was_overtaken=kept is not None and attempt is first)
        if kept is not None:
            self._routing.note_attach(verifier, kept.age_s)
            self._report(kept, Outcome.ANSWERED)
        return kept

    async def _stay(self, attempt: AttachAttempt) -> None:
        """Until the attachment is over."""
        began = time.monotonic()
        endpoint = self.drafter = attempt.drafter.endpoint
        _log.info("drafter_attached", session_id=self._facts.session_id, drafter=endpoint)
        outcome: Outcome | SpecdecError = Outcome.WORKED
        try:
            await attempt.over.wait()
            reason = attempt.detach_reason
            if reason not in _NOT_THE_DRAFTERS_FAULT and time.monotonic() - began < _STABLE_AFTER_S:
                outcome = PeerUnavailableError("the attachment ended at once")
            fields = {"drafter": endpoint, "reason": reason.value if reason is not None else ""}
            _log.info("drafter_detached", session_id=self._facts.session_id, **fields)
        finally:
            self.drafter = ""
            self._attempts.remove(attempt)
            self._report(attempt, outcome)

    def _try(self, drafter: EndpointView) -> AttachAttempt:
        attachment_id = AttachmentId(next(self._attachment_ids))
        attempt = AttachAttempt(self._cluster, self._facts, drafter, attachment_id, self._known_token_ids())
        self._attempts.append(attempt)
        self._report(attempt, Outcome.TRIED)
        return attempt

    async def _take_failure(self, attempt: AttachAttempt) -> None:
        if attempt.came_through:
            return self._report(attempt, Outcome.ANSWERED)  # replaced already, by the other attempt
        error = attempt.attached.exception()
        if not isinstance(error, SpecdecError):
            raise error or RuntimeError("an attach neither failed nor came through")
        drafter, refusal = attempt.drafter, error.metadata.get("refusal", "")
        # A drafter's own words stay out of the log: it knows the prompt, and chooses the names of its metadata.
        fields = {
            "drafter": drafter.endpoint,
            "reason": error.reason,
            "refusal": refusal if refusal in _REFUSALS else "",
        }
        _log.warning("drafter_not_attached", session_id=self._facts.session_id, **fields)
        if isinstance(error, AttachRefusedError) and refusal == AttachRefusal.TOO_MANY_ATTACHMENTS.value:
            error = OverloadedError(error.message)
        if isinstance(error, DeadlineError) and self._facts.is_past_deadline:
            return self._report(attempt, Outcome.ABANDONED)  # the session's client gave up, no fault of the drafter's
        self._report(attempt, error)
        if outcome_of(error) is Outcome.ANSWERED:
            misfit = refusal in _MISFITS
            self._num_refusals[drafter.endpoint, drafter.incarnation] += _MAX_REFUSALS if misfit else 1
            if not misfit and not self._attempts:
                await asyncio.sleep(_REFUSED_PAUSE_S)
        return None

    def _give_up(self, attempt: AttachAttempt, *, was_overtaken: bool) -> None:
        """One that a later attempt at the same verifier overtook was late by its own fault."""
        is_late = was_overtaken and not attempt.came_through
        self._report(attempt, DeadlineError("overtaken") if is_late else Outcome.ABANDONED)
        attempt.attached.cancel()
        self._tell_to_leave(attempt)

    def _tell_to_leave(self, attempt: AttachAttempt) -> None:
        leaving = asyncio.create_task(attempt.give_up(), name=f"leave {attempt.attachment_id}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _report(self, attempt: AttachAttempt, outcome: Outcome | SpecdecError) -> None:
        self._cluster.report(attempt.drafter, outcome, towards=self._facts.verifier_endpoint)

    async def _pause(self, change: asyncio.Event) -> None:
        """Until the cluster changes or a drafter that is left alone may be tried again."""
        rests_s = self._cluster.resting(towards=self._facts.verifier_endpoint).values()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(rests_s, default=_MAX_PAUSE_S)):
                await change.wait()
