"""Open a session at a verifier: everything before `Opened`, at first and again after a verifier was lost.

Knows which verifiers may take a session and how long to look for one; knows nothing of the stream that follows. An
attempt that may have left rows behind at a verifier is followed by one in a higher epoch.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Collection

import structlog

from orchestrator.breaker import Outcome
from orchestrator.claim import Claim
from orchestrator.endpoints import EndpointView
from orchestrator.ownership import Ownership
from orchestrator.progress import Progress
from orchestrator.resuming import require_agreement
from orchestrator.router import choose_verifier
from orchestrator.runner_context import RunnerContext
from specdec.errors import (
    DeadlineError,
    DrainingError,
    FencedError,
    LoadingError,
    NotOfferedError,
    NoVerifierError,
    NumericsUnavailableError,
    OverloadedError,
    PeerUnavailableError,
    PermissionDeniedError,
    SpecdecError,
    UnauthenticatedError,
    UnknownModelError,
    VerifierLostError,
)
from specdec.messages import Fenced, Opened, OpenSession, SessionEvent

_OPEN_TIMEOUT_S = 60.0
"""A verifier answers Opened at once, or when a waiting session's turn comes."""
_NUM_FENCED_CLAIMS = 5
_EQUALS_PATIENCE_S = 1.0
"""A verifier of equal numerics that was out of reach for a moment is looked at again within this; then another will do,
where the request allows it."""
_MIN_REST_S = 0.1
_MAX_REST_S = 2.0
_RETRY_AFTER_S = 1.0

_REFUSALS = (
    DrainingError,
    LoadingError,
    NotOfferedError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownModelError,
)
"""The verifier answered, and has no rows of the session; nor is it the request's fault. What it does not permit is this
orchestrator's certificate, and the model was one that it had told of."""

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class OpenedSession:
    """A verifier's stream, its first event taken off. Whoever has it closes `events`."""

    verifier: EndpointView
    opened: Opened
    events: AsyncGenerator[SessionEvent, None]


class Opener:
    """Takes one session to `Opened`, as often as it needs it."""

    def __init__(self, claim: Claim, progress: Progress, ownership: Ownership, context: RunnerContext) -> None:
        self._claim = claim
        self._progress = progress
        self._ownership = ownership
        self._context = context

    async def take(self) -> OpenedSession:
        """Claims the session and opens it; samples of one request go where the first of them was taken.

        Where no verifier takes it now, that is an error. Where one was lost before it answered, another is looked for
        as in `take_again`.

        Raises:
            SessionExistsError: a new session's id is in use.
            NoVerifierError, OverloadedError, UnknownModelError: no verifier takes the session.
            NumericsUnavailableError: only one of other numerics would, and the request wants none.
            ResumeMismatchError: the prompt that the client brought, or what it received, is not the session's.
            FencedError: somebody else keeps the session, or claims it too.
            StoreUnavailableError: strict, and the store does not answer.
            SpecdecError: what the verifier refused the request with.
        """
        claim, placement = self._claim, self._claim.placement
        if placement is None:
            await self._ownership.next_epoch()
            return await self._open(claim)
        async with placement.deciding:  # before the record is claimed: what fails here leaves no names in use
            if placement.endpoint == "":
                await self._ownership.next_epoch()
                opening = await self._open(claim)
                placement.endpoint = opening.verifier.endpoint
                placement.prompt_token_ids = tuple(opening.opened.prompt_token_ids)
                return opening
        await self._ownership.next_epoch()
        spec = dataclasses.replace(claim.spec, prompt=placement.prompt_token_ids)
        return await self._open(dataclasses.replace(claim, spec=spec), preferred=placement.endpoint)

    async def take_again(self, left: EndpointView) -> OpenedSession:
        """Opens a session that lost its verifier, or left it, at one of equal numerics, in a higher epoch; at any other
        of its model where there is none and the request allows it. Looks for one for `failover_timeout_s`.

        Raises:
            VerifierLostError, NumericsUnavailableError: none takes it; the session can be resumed.
            FencedError: another owner has it.
            StoreUnavailableError: strict, and the store does not answer.
            SpecdecError: what the verifier refused the request with.
        """
        await self._ownership.next_epoch()
        return await self._open(self._progress.claim_now(), left=left)

    def has_equal_besides(self, endpoint: str) -> bool:
        """Whether another verifier of the session's numerics takes sessions now."""
        opened = self._progress.opened
        with contextlib.suppress(NoVerifierError, UnknownModelError):
            choose_verifier(
                self._context.cluster.verifiers,
                opened.model,
                excluded={endpoint, *self._context.cluster.resting()},
                numerics_fingerprint=opened.numerics.fingerprint,
            )
            return True
        return False

    async def _open(self, claim: Claim, preferred: str = "", left: EndpointView | None = None) -> OpenedSession:
        """Tries one verifier after another. After a loss it waits for one, and tries again those that refused."""
        rests: dict[tuple[str, int], float] = {}
        rest_s = _MIN_REST_S
        began = time.monotonic()
        give_up_at = began + self._context.failover_timeout_s
        if left is not None:
            rests[left.endpoint, left.incarnation] = began + rest_s
        was_lost = self._progress.was_opened
        num_fenced = 0
        last_error: SpecdecError | None = None
        fault: SpecdecError | None = None
        while num_fenced < _NUM_FENCED_CLAIMS:
            change = self._context.cluster.next_change()
            now = time.monotonic()
            others_at = began + _EQUALS_PATIENCE_S if was_lost else began
            try:
                verifier = self._choose(claim, self._resting(rests, now), preferred, others_too=now >= others_at)
            except (NoVerifierError, UnknownModelError) as error:
                if fault is not None and not self._progress.was_opened:
                    raise fault from error
                if not was_lost or now >= give_up_at:
                    raise self._given_up(claim, error, last_error) from last_error
                wakes = (give_up_at, others_at, *rests.values(), *self._circuit_ends(now))
                await _wait(change, min(wake for wake in wakes if wake > now) - now)
                continue
            self._context.cluster.report(verifier, Outcome.TRIED)
            try:
                first, events = await self._first_event(claim, verifier)
            except (SpecdecError, TimeoutError) as error:
                self._report_failure(claim, verifier, error)
                if self._is_final(claim, error) or (fault is not None and type(error) is SpecdecError):
                    raise
                fields = {"verifier": verifier.endpoint, "error": type(error).__name__}
                _log.warning("verifier_not_opened", session_id=claim.session_id, **fields)
                last_error = error if isinstance(error, SpecdecError) else None
                if type(error) is SpecdecError and not self._progress.was_opened:
                    # A fault of the verifier's own, or of a request that hurts them all: one other is asked, no more.
                    fault = error
                elif not isinstance(error, _REFUSALS):
                    was_lost = True
                if not isinstance(error, _REFUSALS):
                    await self._ownership.next_epoch()  # it may have rows of this one
                asks_again = was_lost and fault is not error
                rests[verifier.endpoint, verifier.incarnation] = time.monotonic() + rest_s if asks_again else math.inf
                rest_s = min(2 * rest_s, _MAX_REST_S)
                continue
            except BaseException:  # its client is gone, or its deadline passed
                self._context.cluster.report(verifier, Outcome.ABANDONED)
                raise
            self._context.cluster.report(verifier, Outcome.ANSWERED)
            if isinstance(first, Opened):
                return OpenedSession(verifier, first, events)
            self._progress.apply(first)
            if self._progress.was_opened:
                break
            num_fenced += 1
            await self._ownership.next_epoch(first.highest_epoch)
        raise FencedError("another owner claims the session too")

    def _is_final(self, claim: Claim, error: SpecdecError | TimeoutError) -> bool:
        """Whether no other verifier is to be asked. Where one took the request before, what others refuse it for is a
        limit of their own; else it is the request's fault."""
        match error:
            case DeadlineError():
                return claim.is_past_deadline
            case PeerUnavailableError() | VerifierLostError() | TimeoutError():
                return False
            case _ if isinstance(error, _REFUSALS) or type(error) is SpecdecError:
                return False
            case _:
                return not self._progress.was_opened

    def _report_failure(self, claim: Claim, verifier: EndpointView, error: SpecdecError | TimeoutError) -> None:
        outcome: Outcome | BaseException = error
        if isinstance(error, OverloadedError):  # not left alone: who asks it is told that it is full, and for how long
            outcome = Outcome.ANSWERED
        elif isinstance(error, DeadlineError) and claim.is_past_deadline:
            outcome = Outcome.ABANDONED
        self._context.cluster.report(verifier, outcome)

    def _choose(self, claim: Claim, excluded: Collection[str], preferred: str, *, others_too: bool) -> EndpointView:
        """One of equal numerics where the session has tokens already; raises as choose_verifier."""

        def choose(only: str = "", numerics_fingerprint: str | None = None) -> EndpointView:
            return self._context.routing.choose_verifier(
                [view for view in self._context.cluster.verifiers if only in ("", view.endpoint)],
                claim.session_id,
                claim.spec,
                claim.tenant,
                excluded=excluded,
                num_own_sessions=self._context.num_own_sessions(),
                numerics_fingerprint=numerics_fingerprint,
            )

        if preferred:
            with contextlib.suppress(NoVerifierError, UnknownModelError):
                return choose(preferred)
        if claim.numerics_fingerprint == "":
            return choose()
        try:
            return choose(numerics_fingerprint=claim.numerics_fingerprint)
        except NoVerifierError:
            if claim.spec.same_numerics_only or not others_too:
                raise
        return choose()

    def _resting(self, rests: dict[tuple[str, int], float], now: float) -> set[str]:
        """Those that failed this session a moment ago and did not come back since, or that fail all of them."""
        incarnations = {view.endpoint: view.incarnation for view in self._context.cluster.verifiers}
        own = {
            endpoint
            for (endpoint, incarnation), end in rests.items()
            if end > now and incarnations.get(endpoint) == incarnation
        }
        return own | self._context.cluster.resting().keys()

    def _circuit_ends(self, now: float) -> list[float]:
        return [now + rest_s for rest_s in self._context.cluster.resting().values()]

    def _given_up(self, claim: Claim, error: SpecdecError, last_error: SpecdecError | None) -> SpecdecError:
        if claim.numerics_fingerprint and claim.spec.same_numerics_only:
            with contextlib.suppress(NoVerifierError, UnknownModelError):
                choose_verifier(self._context.cluster.verifiers, claim.spec.model)
                return NumericsUnavailableError("no verifier of equal numerics is left", retry_after_s=_RETRY_AFTER_S)
        if self._progress.was_opened:
            looked_s = self._context.failover_timeout_s
            message = f"the verifier was lost, and none took the session within {looked_s:g} s; it can be resumed"
            return VerifierLostError(message, retry_after_s=_RETRY_AFTER_S)
        return last_error if isinstance(last_error, OverloadedError) else error

    async def _first_event(
        self, claim: Claim, verifier: EndpointView
    ) -> tuple[Opened | Fenced, AsyncGenerator[SessionEvent, None]]:
        request = OpenSession(
            session_id=claim.session_id,
            epoch=self._ownership.epoch,
            owner_nonce=claim.owner_nonce,
            spec=claim.spec,
            committed_token_ids=claim.committed_token_ids,
            prompt_length=claim.prompt_length,
            tenant=claim.tenant,
            sample_index=claim.sample_index,
            recorded_token_ids=claim.recorded_token_ids,
            recorded_epoch=claim.recorded_epoch,
        )
        try:
            peer = self._context.cluster.verifier(verifier.endpoint)
        except KeyError as error:
            raise PeerUnavailableError("the verifier is gone") from error
        time_left_s = None if claim.deadline is None else max(claim.deadline - time.monotonic(), 0.0)
        async with contextlib.AsyncExitStack() as stack:
            events = await stack.enter_async_context(contextlib.aclosing(peer.open_session(request, time_left_s)))
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    first = await anext(events, None)
            except PeerUnavailableError:
                self._context.cluster.suspect(verifier)
                raise
            if isinstance(first, Opened):
                if claim.unread_prompt_of is not None:  # what does not agree ends the verifier's stream here
                    require_agreement(claim.unread_prompt_of, first.prompt_token_ids, claim.committed_token_ids)
                stack.pop_all()
                return first, events
            if isinstance(first, Fenced):
                return first, events
            raise VerifierLostError("the verifier ended the session before it opened it")


async def _wait(change: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await change.wait()
