"""One session's loop: propose, send, take the answer, again. Owns no stream and no model; it asks the device thread.

- Exactly one draft is pending. Where there is no guess an empty draft goes out at once, so that nobody waits for one.
- With a budget of 0 nothing is sent, and caches are brought up in a small share of the time: the verifier may have none
  to give because of what drafters cost.
- While an answer is awaited, a cache that has fallen behind is brought up in chunks of 32 tokens or more. A draft that
  is due during a chunk is empty; before another chunk the proposer is asked again, in case it does without.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from drafter_service.attachment import Attachment, DraftOutcome
from drafter_service.device import DeviceThread
from drafter_service.draft_length import DraftLengthPolicy, DraftPlan
from drafter_service.proposers.base import NOTHING, Proposal, ProposerSession
from drafter_service.shared_measurements import SharedMeasurements
from specdec.messages import Draft, Refused, Verdict, VerifierMessage
from specdec.telemetry import DrafterMetrics

WARM_CHUNK_TOKENS = 32
MAX_WARM_CHUNK_TOKENS = 1024
WARM_CHUNK_TARGET_S = 0.1
"""Chunks grow while they take less than half of this: other sessions' drafts wait behind one."""
MAX_REFUSED_IN_A_ROW = 3

log = structlog.get_logger(__name__)


class MisbehavedError(Exception):
    """This drafter's drafts break the protocol again and again: a fault of its own."""


class DraftLoop:
    """Drives one attachment until it is over. `receive` and `run` belong to the event loop's thread.

    Args:
        attachment: the state, from Attached on.
        session: the proposer's side; used on the device thread alone, save for `backlog` between calls.
        send: puts a message on the verifier's stream; raises where that is gone.
        max_draft_tokens: the drafter's and the request's own limit.
    """

    def __init__(
        self,
        attachment: Attachment,
        session: ProposerSession,
        device: DeviceThread,
        send: Callable[[Draft], None],
        measured: SharedMeasurements,
        metrics: DrafterMetrics,
        max_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attachment = attachment
        self._session = session
        self._device = device
        self._send = send
        self._measured = measured
        self._policy = DraftLengthPolicy(measured.verify_times, measured.model_drafts, max_draft_tokens)
        self._metrics = metrics
        self._clock = clock
        self._news = asyncio.Event()
        self._observed: DraftOutcome | None = None
        self._warming: asyncio.Future[float] | None = None
        self._warm_chunk_tokens = WARM_CHUNK_TOKENS
        self._was_asked = True  # the proposer, for the pending draft
        self._num_answers = 0
        self._num_refused_in_a_row = 0

    def receive(self, message: VerifierMessage) -> None:
        """Takes a message of the verifier. Raises OutOfStepError, after which the attachment must be given up."""
        outcome = self._attachment.apply(message)
        if outcome is not None:
            self._learn(outcome)
        self._news.set()

    async def run(self) -> None:
        """Returns when the attachment is over; raises what the proposer raises."""
        try:
            while not self._attachment.is_over:
                self._news.clear()
                if self._attachment.may_draft:
                    await self._draft()
                self._collect_warming()
                self._start_warming()
                if not (self._attachment.is_over or self._attachment.may_draft):
                    await self._news.wait()
        finally:
            if self._warming is not None:
                await asyncio.wait([self._warming])
                self._warming.exception()

    async def _draft(self) -> None:
        started_at = self._clock()
        self._metrics.draft_budget.observe(self._attachment.draft_budget)
        proposal, start_position = await self._propose(self._policy.plan(self._attachment.draft_budget))
        if not self._attachment.may_draft:
            return
        now = self._clock()
        # Where the verifier went on meanwhile, too: it will again unless it learns that there is somebody to wait for.
        draft = self._attachment.next_draft(proposal, start_position, now - started_at, now)
        self._send(draft)
        if draft.draft_token_ids:
            self._metrics.num_drafts.inc()
            self._metrics.num_draft_tokens.inc(len(draft.draft_token_ids))
            self._metrics.draft_seconds.observe(draft.draft_time_s)

    async def _propose(self, plan: DraftPlan) -> tuple[Proposal, int]:
        """A proposal cut to what is worth sending, and its position; nothing while the session's cache is warmed."""
        self._was_asked = self._warming is None
        if plan.max_tokens == 0 or not self._was_asked:
            return NOTHING, len(self._attachment.committed_token_ids)
        outcome, self._observed = self._observed, None
        proposal, start_position, elapsed_s = await self._device.run(self._propose_on_device, outcome, plan)
        if proposal.num_model_tokens:
            self._measured.model_drafts.observe_time(proposal.num_model_tokens, proposal.num_read_tokens, elapsed_s)
        if proposal.reach_probs:
            proposal = proposal.truncated(self._policy.num_tokens_worth_sending(proposal.reach_probs, elapsed_s))
        return proposal, start_position

    def _propose_on_device(self, outcome: DraftOutcome | None, plan: DraftPlan) -> tuple[Proposal, int, float]:
        """A proposal for what is committed when the device gets to it: the verifier may have gone on meanwhile."""
        started_at = self._clock()
        committed = self._attachment.snapshot()
        if outcome is not None:
            self._session.observe(outcome.num_judged_tokens, outcome.num_right_tokens)
        if not self._attachment.may_draft:
            return NOTHING, len(committed), 0.0
        proposal = self._session.propose(committed, plan.max_tokens, plan.limits)
        return proposal, len(committed), self._clock() - started_at

    # --- Answers -----------------------------------------------------------------------------------------------------

    def _learn(self, outcome: DraftOutcome) -> None:
        self._num_answers += 1
        draft = outcome.pending.draft
        latency_s = self._clock() - outcome.pending.sent_at
        self._num_refused_in_a_row = self._num_refused_in_a_row + 1 if isinstance(outcome.answer, Refused) else 0
        if isinstance(outcome.answer, Refused):
            self._metrics.refused_drafts.labels(outcome.answer.reason.value).inc()
            if self._num_refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
                raise MisbehavedError(outcome.answer.reason.value)
            return
        if not isinstance(outcome.answer, Verdict):
            self._metrics.stale_drafts.labels(outcome.answer.reason.value).inc()
            if outcome.was_late:
                self._judge(outcome)
            return
        self._metrics.num_accepted_tokens.inc(outcome.answer.num_accepted_tokens)
        self._metrics.round_trip_seconds.observe(latency_s)
        # The first answer may have waited for the prompt's prefill, a tail for the round before, and where the budget
        # ended the draft was cut: none of them tells the time of a round.
        is_whole = outcome.answer.base_position == draft.start_position and outcome.answer.draft_budget > 0
        if self._num_answers > 1 and is_whole:
            self._measured.verify_times.observe(1 + len(draft.draft_token_ids), latency_s)
        self._judge(outcome)

    def _judge(self, outcome: DraftOutcome) -> None:
        """Learns from tokens that were found right or wrong, late ones too: else only what was quick would count."""
        proposal = outcome.pending.proposal
        if not proposal.token_ids:
            return
        self._observed = outcome
        if proposal.num_model_tokens:
            self._policy.observe_model_draft(outcome.num_judged_tokens, outcome.num_right_tokens)
            if outcome.was_late:
                self._policy.observe_late_draft(len(proposal.token_ids))

    # --- Warming -----------------------------------------------------------------------------------------------------

    def _start_warming(self) -> None:
        """Feeds the next chunk of committed tokens where the proposer's cache has fallen a chunk or more behind."""
        is_unwanted = self._attachment.draft_budget == 0
        if self._warming is not None or self._attachment.is_over or not (self._was_asked or is_unwanted):
            return
        if is_unwanted and not self._measured.unwanted_warming.may_start(self._clock()):
            return
        committed = self._attachment.snapshot()
        backlog = self._session.backlog(committed)
        if backlog >= WARM_CHUNK_TOKENS:
            warm_length = len(committed) - backlog + min(backlog, self._warm_chunk_tokens)
            self._warming = self._device.run(self._warm_on_device, committed[:warm_length])
            self._warming.add_done_callback(lambda _: self._news.set())
            if is_unwanted:
                unwanted = self._measured.unwanted_warming
                unwanted.start(self._clock())
                self._warming.add_done_callback(lambda _: unwanted.end(self._clock()))

    def _warm_on_device(self, committed: Sequence[int]) -> float:
        started_at = self._clock()
        self._session.warm(committed)
        return self._clock() - started_at

    def _collect_warming(self) -> None:
        if self._warming is not None and self._warming.done():
            elapsed_s = self._warming.result()
            self._warming = None
            if 2 * elapsed_s < WARM_CHUNK_TARGET_S:
                self._warm_chunk_tokens = min(2 * self._warm_chunk_tokens, MAX_WARM_CHUNK_TOKENS)
