"""What a forward decides: tokens of rounds and log-probabilities of prompts, from logits to the sessions' events.

All rounds of a step are decided at once; what one decides depends on no other. Knows sessions and decisions; refuses to
know how rows were chosen and what becomes of a session that ends.

Shapes: R rows of the rounds, P prompt rows that are scored, V logit rows of the model.
"""

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.decoding.rounds import RoundDecision, RoundInput, decide_rounds, token_logprobs
from specdec.messages import Commit, PromptLogprobs, RoundStatistics
from specdec.model.runner import Rows
from specdec.params import FinishReason
from verifier_service.drafters import Drafters
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SessionRows
from verifier_service.session import EndedTokens, VerifierSession

log = logging.getLogger(__name__)


def runner_rows(planned: SessionRows) -> Rows:
    """Committed tokens that are not cached yet, then the draft; logits from where anything is to be learned of them."""
    session = planned.session
    cached = session.cache.length
    parents = planned.draft.parent_indices
    parent_rows = None
    if parents is not None:
        last = planned.num_prefill - 1
        parent_rows = [*range(-1, last), *(last + 1 + parent for parent in parents)]
    if planned.is_round:
        logits_from = planned.num_prefill - 1
    elif session.is_scoring:
        logits_from = min(planned.num_prefill, session.scored_length - 1 - cached)
    else:
        logits_from = planned.num_prefill
    return Rows(
        cache=session.cache,
        token_ids=[*session.token_ids[cached : cached + planned.num_prefill], *planned.draft.token_ids],
        parent_rows=parent_rows,
        logits_from=logits_from,
    )


class Rounds:
    """Decides and commits. Called after a forward, before anything else happens to its sessions."""

    def __init__(
        self, drafters: Drafters, observer: EngineObserver, num_real_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._drafters = drafters
        self._observer = observer
        self._num_real_tokens = num_real_tokens
        self._clock = clock

    def decide(self, rounds: Sequence[SessionRows], logits: Tensor) -> list[RoundDecision | None]:
        """The decisions on logits [R, V]; None for a round that could not be decided, which harms no other."""
        inputs = [_round_input(planned) for planned in rounds]
        try:
            return list(decide_rounds(inputs, logits, self._num_real_tokens))
        except Exception:
            log.exception("deciding rounds together failed", extra={"num_rounds": len(rounds)})
        decisions: list[RoundDecision | None] = []
        first_row = 0
        for one in inputs:
            end_row = first_row + 1 + len(one.draft.token_ids)
            try:
                decisions += decide_rounds([one], logits[first_row:end_row], self._num_real_tokens)
            except Exception:
                log.exception("deciding a round failed")
                decisions.append(None)
            first_row = end_row
        return decisions

    def commit(
        self, planned: SessionRows, decision: RoundDecision, started_at: float, forward_time_s: float
    ) -> FinishReason | None:
        """Makes what was decided the session's, and tells its owner and its drafter. Returns how the output ends."""
        session, acceptance = planned.session, decision.acceptance
        base_position = session.committed_length
        drafted = [planned.draft.token_ids[node] for node in acceptance.accepted_node_indices]
        ended = session.end([*drafted, acceptance.next_token_id])
        num_accepted = min(len(drafted), len(ended.token_ids))
        accepted_nodes = acceptance.accepted_node_indices[:num_accepted]
        if planned.draft.parent_indices is not None:
            # Rows from base_position on are the draft's: the last committed token's row lies before it.
            session.cache.compact(base_position, accepted_nodes)
        session.commit(ended.token_ids)
        session.cache.rollback(min(session.cache.length, session.committed_length - 1))
        statistics = self._statistics(planned, decision, ended, num_accepted, started_at, forward_time_s)
        self._drafters.answer_round(
            session,
            planned.answers,
            base_position,
            planned.drafters_nodes(accepted_nodes),
            len(planned.draft.token_ids),
            num_accepted,
            ended.finish_reason,
        )
        untold_text = session.take_untold_text()
        session.sink(
            Commit(
                round=session.round,
                base_position=base_position,
                token_ids=ended.token_ids,
                text=untold_text + "".join(ended.texts),
                token_texts=() if untold_text else ended.texts,  # they would not be the text
                statistics=statistics,
                cached_length=session.cache.length,
                logprobs=decision.logprobs[: len(ended.token_ids)],
            )
        )
        return ended.finish_reason

    def score(self, planned: SessionRows, logits: Tensor) -> None:
        """Tells the log-probabilities of the prompt tokens that follow the scored rows [P, V]."""
        session = planned.session
        start = session.scored_length
        end = session.cache.length + 1
        if start >= end:
            return  # rows that are computed again after a preemption
        logprobs = token_logprobs(
            logits, session.token_ids[start:end], session.spec.num_prompt_logprobs or 0, self._num_real_tokens
        )
        session.scored_length = end
        session.sink(PromptLogprobs(start, logprobs))

    def _statistics(
        self,
        planned: SessionRows,
        decision: RoundDecision,
        ended: EndedTokens,
        num_accepted: int,
        started_at: float,
        forward_time_s: float,
    ) -> RoundStatistics:
        session, answers, now = planned.session, planned.answers, self._clock()
        has_next = len(ended.token_ids) > num_accepted
        statistics = RoundStatistics(
            num_draft_tokens=len(planned.draft.token_ids),
            num_accepted_tokens=num_accepted,
            next_token_kind=decision.acceptance.next_token_kind if has_next else None,
            total_time_s=now - (started_at if session.last_commit_at is None else session.last_commit_at),
            verify_forward_time_s=forward_time_s,
            queue_time_s=max(0.0, started_at - _ready_at(planned, started_at)),
            draft_time_s=answers.draft.draft_time_s if answers else None,
            round_trip_time_s=answers.round_trip_time_s if answers else None,
            fallback_decode=planned.fallback_decode,
        )
        session.last_commit_at = session.ready_at = now
        session.tally.count_round(statistics, planned.draft_depth)
        self._observer.round(statistics, len(ended.token_ids))
        return statistics


def _round_input(planned: SessionRows) -> RoundInput:
    session: VerifierSession = planned.session
    return RoundInput(
        params=session.spec.sampling,
        noise=session.noise,
        base_position=session.committed_length,
        draft=planned.draft,
        history=session.history,
        suppressed_token_ids=session.end_token_ids,
        num_logprobs=session.spec.num_logprobs,
    )


def _ready_at(planned: SessionRows, started_at: float) -> float:
    if planned.answers is not None:
        return planned.answers.arrived_at
    return started_at if planned.session.ready_at is None else planned.session.ready_at
