"""Whether a step waits for drafts that are on their way, or runs with what it has: what decides more tokens a second.

A forward costs nearly the same for one session as for many, so one that runs takes every session along: who has no
draft decodes alone, and the rest of its draft is used in the next round if it guessed that token. Hence a step waits
as a whole, or not at all, and rounds are never fewer than without drafters. Pure: knows times and numbers, no sessions.
"""

import dataclasses
import math
from collections.abc import Sequence

KEPT_SHARE = 0.5
"""Of what a draft would bring, about so much comes all the same a round later, when nobody waits for it: less where it
comes many rounds later, since each of those decides one of its tokens."""
MAX_SHARE_OF_FORWARD = 0.5
"""Who is ready waits for others no longer than this share of a forward."""
MAX_FORWARDS_ALONE = 8.0
"""A lone session waits for a draft that takes no longer than so many forwards."""
MIN_WAIT_S = 0.0005
"""A draft that is due now is given so long; one that is overdue as long again as it is overdue."""


@dataclasses.dataclass(frozen=True)
class AwaitedDraft:
    """`latency_s`: expected, from when it could be made. `gain`: tokens that it is expected to bring. It is not waited
    for beyond `deadline`."""

    expected_at: float
    latency_s: float
    gain: float
    deadline: float


def worth_waiting_until(
    awaited: Sequence[AwaitedDraft], num_ready: int, ready_since: float, forward_s: float, now: float
) -> tuple[float, int]:
    """The time until which a step waits, and for how many drafts; `now` and 0 where it had better run.

    Args:
        awaited: of sessions that would decode alone now.
        num_ready: sessions that have no draft to wait for: a token each, and more as fits their drafts.
        ready_since: when the first of those was ready.
        forward_s: expected time of the forward.
    """
    latest = ready_since + MAX_SHARE_OF_FORWARD * forward_s if num_ready else float("inf")
    arrivals = []
    for draft in awaited:
        due_at = max(now + MIN_WAIT_S, draft.expected_at, 2 * now - draft.expected_at)
        if due_at <= min(draft.deadline, latest):
            num_rounds_meanwhile = math.ceil((due_at - now) / forward_s)
            kept = min(KEPT_SHARE * draft.gain, max(0.0, draft.gain - num_rounds_meanwhile))
            arrivals.append((due_at, draft.gain - kept))
    tokens = float(num_ready + len(awaited))
    best_rate, best = tokens / forward_s, (now, 0)
    for num_drafts, (due_at, gain) in enumerate(sorted(arrivals), start=1):
        tokens += gain
        rate = tokens / (due_at - now + forward_s)
        if rate > best_rate:
            best_rate, best = rate, (due_at, num_drafts)
    return best


def waits_alone(draft: AwaitedDraft, forward_s: float) -> bool:
    """Whether a session for which nobody waits had better wait for its draft.

    Its drafter chooses lengths for which waiting pays, down to an empty draft that is there at once; what a draft that
    nobody waited for brought says little of it. Only drafts that are out of all proportion are not waited for.
    """
    return draft.latency_s <= MAX_FORWARDS_ALONE * forward_s
