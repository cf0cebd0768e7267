"""Choose the rows of the next forward. Pure: sessions and the time go in, a plan comes out.

Rounds come first, so that running sessions go on in every step; what is left of the row budget goes to prompts, and a
share of it always, so that neither keeps the other waiting. Where there are more rounds than rows, tenants take turns
by what they were served, and a tenant's sessions by how long they were not. Among a tenant's prompts the shortest is
next, and the eldest of all has a share to itself: a short one is not stuck behind a long one, and the long one
advances.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from specdec.decoding.draft import DraftTokens
from specdec.messages import DropReason
from verifier_service.alignment import AlignedDraft, align, cut
from verifier_service.attachment import PendingDraft
from verifier_service.fairness import TenantShares
from verifier_service.patience import AwaitedDraft, waits_alone, worth_waiting_until
from verifier_service.session import VerifierSession

NO_DRAFT = DraftTokens()
PREFILL_SHARE = 4
"""One row in so many is kept for prompts while there are any, so that running sessions never starve a new one."""
ELDEST_SHARE = 4
"""One prompt row in so many is the eldest prompt's, however many shorter ones there are."""
MAX_SCORED_ROWS = 64
"""Of one prompt in one step, where log-probabilities are wanted: each row has logits over the whole vocabulary."""


@dataclasses.dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step: at least two rows, so that a prompt advances beside a round.

    `draft_wait_s`: the longest that a round waits, where it pays, for a drafter that delivered its last draft in time.
    `judges_drafts`: whether speculation stops where steps without it decide more; a measurement may want it always.
    """

    max_step_rows: int
    max_draft_tokens: int
    draft_wait_s: float
    judges_drafts: bool = True

    def __post_init__(self) -> None:
        if self.max_step_rows < 2:
            raise ValueError("a step has at least two rows")

    def wait_s(self, session: VerifierSession) -> float:
        """How long a round of this session waits for its draft."""
        wanted_s = session.spec.speculation.max_draft_wait_s
        return self.draft_wait_s if wanted_s is None else min(wanted_s, self.draft_wait_s)

    def num_rows_for_prompts(self) -> int:
        """Rows of a step that rounds leave to prompts."""
        return max(1, self.max_step_rows // PREFILL_SHARE)


@dataclasses.dataclass(frozen=True)
class SessionRows:
    """One session's rows: `num_prefill` committed tokens that are not cached yet, then the draft's nodes.

    `is_round`: the rows reach the last committed token, so the forward decides at least one token. `fallback_decode`:
    the session decodes alone though it has a drafter; `gave_up`: after it waited in vain.
    """

    session: VerifierSession
    num_prefill: int
    is_round: bool
    draft: DraftTokens = NO_DRAFT
    draft_nodes: Sequence[int] = ()
    answers: PendingDraft | None = None
    fallback_decode: bool = False
    gave_up: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_prefill + len(self.draft.token_ids)

    @property
    def draft_depth(self) -> int:
        """Tokens from the draft's root to its deepest leaf."""
        if self.draft.parent_indices is None:
            return len(self.draft.token_ids)
        depths = [0]  # of row 0, then of each node
        for parent in self.draft.parent_indices:
            depths.append(depths[1 + parent] + 1)
        return max(depths)

    def drafters_nodes(self, nodes: Sequence[int]) -> Sequence[int]:
        """Nodes of a tree in the drafter's own numbering, which alignment and cutting changed; none for a chain."""
        return () if self.draft.parent_indices is None else [self.draft_nodes[node] for node in nodes]

    def with_draft_cut(self, max_nodes: int) -> "SessionRows":
        """The same with at most so many nodes of its draft."""
        if len(self.draft.token_ids) <= max_nodes:
            return self
        draft = cut(AlignedDraft(self.draft, self.draft_nodes), max_nodes=max_nodes, max_depth=max_nodes)
        return dataclasses.replace(self, draft=draft.tokens, draft_nodes=draft.nodes)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Rows to run, drafts that turned out useless, and when to look again if nothing is to be run before.

    Without rows, the step waits for so many drafts; `is_anyone_ready` says whether somebody has none to wait for.
    """

    rows: Sequence[SessionRows]
    dropped: Sequence[tuple[VerifierSession, PendingDraft, DropReason]]
    next_deadline: float | None
    num_awaited_drafts: int = 0
    is_anyone_ready: bool = False


def plan_step(
    policy: SchedulerPolicy,
    sessions: Iterable[VerifierSession],
    shares: TenantShares,
    now: float,
    *,
    forward_s: float = 0.0,
    ready_since: float | None = None,
) -> StepPlan:
    """The next step's rows over the admitted sessions: rounds, then prompts that are scored, then other prompts.

    So rows that have logits stand before those that have none.

    Args:
        policy: limits of the step.
        sessions: the admitted ones.
        shares: what each tenant was served.
        now: the time.
        forward_s: expected time of the step's forward; 0 where nothing was measured.
        ready_since: when an earlier plan first found somebody ready and waited for others, if one did.
    """
    rounds: list[SessionRows] = []
    prefills: list[VerifierSession] = []
    dropped: list[tuple[VerifierSession, PendingDraft, DropReason]] = []
    awaited: list[tuple[VerifierSession, AwaitedDraft]] = []
    for session in sessions:
        if session.num_uncached > 1:
            prefills.append(session)
            continue
        planned = _plan_round(policy, session, now, dropped)
        if isinstance(planned, SessionRows):
            rounds.append(planned)
        else:
            awaited.append((session, planned))
    if awaited:
        drafts = [draft for _, draft in awaited]
        num_ready = len(rounds) + len(prefills)
        since = now if ready_since is None else ready_since
        wait_until, num_drafts = _wait_for(drafts, num_ready, since, forward_s, now)
        if wait_until > now:
            return StepPlan([], dropped, wait_until, num_drafts, num_ready > 0)
        rounds += [SessionRows(session, 1, is_round=True, fallback_decode=True) for session, _ in awaited]
    reserved = policy.num_rows_for_prompts() if prefills else 0
    rows = _fit_rounds(rounds, policy.max_step_rows - reserved, shares)
    if prefills:
        rows += _plan_prefills(prefills, policy.max_step_rows - sum(planned.num_rows for planned in rows), shares)
    return StepPlan(rows, dropped, None)


def _wait_for(
    drafts: Sequence[AwaitedDraft], num_ready: int, ready_since: float, forward_s: float, now: float
) -> tuple[float, int]:
    """The time until which the step waits, and for how many drafts: several sessions by what makes the most tokens a
    second, a lone one and everybody before any forward was measured as long as the policy allows."""
    if forward_s > 0 and (num_ready > 0 or len(drafts) > 1):
        return worth_waiting_until(drafts, num_ready, ready_since, forward_s, now)
    if num_ready > 0 or (forward_s > 0 and not waits_alone(drafts[0], forward_s)):
        return now, 0
    return min(draft.deadline for draft in drafts), 1


def _plan_round(
    policy: SchedulerPolicy,
    session: VerifierSession,
    now: float,
    dropped: list[tuple[VerifierSession, PendingDraft, DropReason]],
) -> SessionRows | AwaitedDraft:
    """One session's round, or the draft that it may wait for."""
    attachment = session.attachment
    if attachment is None:
        return SessionRows(session, 1, is_round=True)
    pending = attachment.pending
    if pending is not None:
        aligned = align(pending.draft, session.token_ids)
        if not isinstance(aligned, DropReason):
            draft = cut(aligned, max_nodes=session.draft_budget, max_depth=session.num_tokens_left - 1)
            return SessionRows(session, 1, is_round=True, draft=draft.tokens, draft_nodes=draft.nodes, answers=pending)
        dropped.append((session, pending, aligned))
    # The answer to a dropped draft asks for the next one: else each would come for the round that has just begun.
    asked_at = attachment.asked_at if pending is None else now
    if session.draft_budget == 0 or asked_at is None:
        return SessionRows(session, 1, is_round=True)  # a drafter that was told of no budget sends nothing
    # The first round waits for nobody.
    deadline = now if session.ready_at is None else session.ready_at + policy.wait_s(session)
    if attachment.num_useless + (pending is not None) > 1:  # else one after the other could hold up the round
        return SessionRows(session, 1, is_round=True, fallback_decode=True)
    if not attachment.delivers or now >= deadline:
        return SessionRows(session, 1, is_round=True, fallback_decode=True, gave_up=attachment.delivers)
    latency_s = attachment.draft_latency_s or 0.0
    return AwaitedDraft(
        expected_at=asked_at + latency_s,
        latency_s=latency_s,
        gain=min(attachment.accepted_per_draft, session.draft_budget),
        deadline=deadline,
    )


def _fit_rounds(rounds: list[SessionRows], max_rows: int, shares: TenantShares) -> list[SessionRows]:
    """The rounds that are served in a step of so many rows: all, or by turns, the last draft cut to what is left."""
    if sum(planned.num_rows for planned in rounds) <= max_rows:
        return rounds
    by_tenant: dict[str, list[SessionRows]] = {}
    for planned in sorted(rounds, key=lambda planned: planned.session.last_served):
        by_tenant.setdefault(planned.session.tenant, []).append(planned)
    fitted: list[SessionRows] = []
    rows_left = max_rows
    for planned in shares.by_turns(by_tenant, lambda planned: planned.num_rows):
        if rows_left == 0:
            break
        fitted.append(planned.with_draft_cut(rows_left - 1))
        rows_left -= fitted[-1].num_rows
    return fitted


def _plan_prefills(prefills: Sequence[VerifierSession], max_rows: int, shares: TenantShares) -> list[SessionRows]:
    """Chunks of prompts in so many rows."""
    eldest = min(prefills, key=lambda session: session.arrival)
    num_rows = dict.fromkeys(prefills, 0)
    num_rows[eldest] = min(_num_rows_wanted(eldest), max(1, max_rows // ELDEST_SHARE))
    rows_left = max_rows - num_rows[eldest]
    by_tenant: dict[str, list[VerifierSession]] = {}
    for session in sorted(prefills, key=lambda session: (_num_rows_wanted(session), session.arrival)):
        by_tenant.setdefault(session.tenant, []).append(session)
    for session in shares.by_turns(by_tenant, num_rows.__getitem__):
        if rows_left == 0:
            break
        more = min(_num_rows_wanted(session) - num_rows[session], rows_left)
        num_rows[session] += more
        rows_left -= more
    planned = [
        SessionRows(session, num, is_round=num == session.num_uncached and not session.is_scoring)
        for session, num in num_rows.items()
        if num > 0
    ]
    return sorted(planned, key=lambda rows: (not rows.is_round, not rows.session.is_scoring))


def _num_rows_wanted(session: VerifierSession) -> int:
    """Rows that a prompt may have in one step. One that is scored ends before its last token, which is a round."""
    if not session.is_scoring:
        return session.num_uncached
    return min(session.prompt_length - 1 - session.cache.length, MAX_SCORED_ROWS)
