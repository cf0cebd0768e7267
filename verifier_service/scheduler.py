"""Choose the rows of the next forward. Pure: sessions and the time go in, a plan comes out.

Sessions whose round can start come first, oldest first; what is left of the row budget goes to prefill, and a share of
it always, so that neither keeps the other waiting.
"""

import dataclasses
from collections.abc import Sequence

from specdec.decoding.draft import DraftTokens
from specdec.messages import DropReason
from verifier_service.alignment import align, cut
from verifier_service.attachment import PendingDraft
from verifier_service.session import VerifierSession

NO_DRAFT = DraftTokens()
PREFILL_SHARE = 4
"""One row in so many is kept for prompts while there are any, so that running sessions never starve a new one."""


@dataclasses.dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step. `draft_wait_s`: how long a round waits for a drafter that delivered its last draft in time."""

    max_step_rows: int
    max_draft_tokens: int
    draft_wait_s: float


@dataclasses.dataclass(frozen=True)
class SessionRows:
    """One session's rows: `num_prefill` committed tokens that are not cached yet, then the draft's nodes.

    `is_round`: the rows reach the last committed token, so the forward decides at least one token.
    """

    session: VerifierSession
    num_prefill: int
    is_round: bool
    draft: DraftTokens = NO_DRAFT
    draft_nodes: Sequence[int] = ()
    answers: PendingDraft | None = None
    fallback_decode: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_prefill + len(self.draft.token_ids)

    def drafters_nodes(self, nodes: Sequence[int]) -> Sequence[int]:
        """Nodes of a tree in the drafter's own numbering, which alignment and cutting changed; none for a chain."""
        return () if self.draft.parent_indices is None else [self.draft_nodes[node] for node in nodes]

    @property
    def paths(self) -> list[list[int]]:
        """For each row of logits the draft tokens before it: none for the last committed token's row."""
        return [[], *(self.draft.path_to(node) for node in range(len(self.draft.token_ids)))]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Rows to run, drafts that turned out useless, and when to look again if nothing is to be run before."""

    rows: Sequence[SessionRows]
    dropped: Sequence[tuple[VerifierSession, PendingDraft, DropReason]]
    next_deadline: float | None


def draft_budget(policy: SchedulerPolicy, session: VerifierSession, num_active_sessions: int) -> int:
    """Most nodes of a draft of this session now: its share of a step, its request, and what may still come."""
    share = policy.max_step_rows // max(1, num_active_sessions) - 1
    wanted = session.spec.speculation.max_draft_tokens
    limit = policy.max_draft_tokens if wanted is None else min(wanted, policy.max_draft_tokens)
    return max(0, min(limit, share, session.num_tokens_left - 1))


def plan_step(policy: SchedulerPolicy, sessions: Sequence[VerifierSession], now: float) -> StepPlan:
    """The next step's rows over the admitted sessions, in the order in which they were last served."""
    rows: list[SessionRows] = []
    dropped: list[tuple[VerifierSession, PendingDraft, DropReason]] = []
    deadlines: list[float] = []
    prefills = [session for session in sessions if session.num_uncached > 1]
    reserved = max(1, policy.max_step_rows // PREFILL_SHARE) if prefills and policy.max_step_rows > 1 else 0
    rows_left = policy.max_step_rows - reserved
    for session in sessions:
        if session.num_uncached > 1:
            continue
        if rows_left == 0:
            deadlines.append(now)
            continue
        round_rows = _plan_round(policy, session, len(sessions), rows_left, now, dropped)
        if isinstance(round_rows, float):
            deadlines.append(round_rows)
            continue
        rows.append(round_rows)
        rows_left -= round_rows.num_rows
    rows_left += reserved
    for session in prefills:
        if rows_left == 0:
            break
        num_rows = min(session.num_uncached, rows_left)
        rows.append(SessionRows(session, num_rows, is_round=num_rows == session.num_uncached))
        rows_left -= num_rows
    return StepPlan(rows, dropped, min(deadlines, default=None))


def _plan_round(
    policy: SchedulerPolicy,
    session: VerifierSession,
    num_active_sessions: int,
    rows_left: int,
    now: float,
    dropped: list[tuple[VerifierSession, PendingDraft, DropReason]],
) -> SessionRows | float:
    """One session's round, or the time until which it waits for its draft."""
    attachment = session.attachment
    if attachment is None:
        return SessionRows(session, 1, is_round=True)
    pending = attachment.pending
    if pending is not None:
        aligned = align(pending.draft, session.token_ids)
        if not isinstance(aligned, DropReason):
            max_nodes = min(draft_budget(policy, session, num_active_sessions), rows_left - 1)
            draft = cut(aligned, max_nodes=max_nodes, max_depth=session.num_tokens_left - 1)
            return SessionRows(session, 1, is_round=True, draft=draft.tokens, draft_nodes=draft.nodes, answers=pending)
        dropped.append((session, pending, aligned))
    if draft_budget(policy, session, num_active_sessions) == 0 or not attachment.delivers:
        return SessionRows(session, 1, is_round=True, fallback_decode=not attachment.delivers)
    wanted_wait_s = session.spec.speculation.max_draft_wait_s
    wait_s = policy.draft_wait_s if wanted_wait_s is None else min(wanted_wait_s, policy.draft_wait_s)
    deadline = now if session.ready_at is None else session.ready_at + wait_s  # the first round waits for nobody
    if now < deadline:
        return deadline
    return SessionRows(session, 1, is_round=True, fallback_decode=True)
