"""How many draft rows a step is worth, and whose: the most expected tokens per second over all sessions at once.

Every draft row has an expected gain, and all rows together have a time. Rows are taken best first (water-filling over
marginal gains), and as many as make `tokens / time` largest: more while forwards are flat in their rows, none where a
row costs more than it brings. Budgets speak of load; how long a draft should be to be accepted is its drafter's choice.
So a lone session has all that it may use, where it may draft at all. Source of the objective: Leviathan et al. 2023
(arXiv:2211.17192), section 3.5, for a batch, with the measured time of the rows. Pure.

Shapes: S sessions with a drafter, K places of a draft, M draft rows that there may be.
"""

import numpy as np
from numpy.typing import NDArray

WORTH_A_CHANGE = 1.02
"""Budgets stay as they are until others promise this much more: load that wavers must not turn drafters on and off."""
INCUMBENTS_EDGE = 1.1
"""A session that has a row gives it up only for a gain this much greater."""

Counts = NDArray[np.int64]


def share_rows(
    gains: NDArray[np.float64],
    limits: Counts,
    before: Counts,
    num_rounds: int,
    num_other_rows: int,
    forward_s: NDArray[np.float64],
) -> Counts:
    """[S] draft rows of each session.

    Args:
        gains: [S, K] expected tokens of a row at each place, non-increasing along a draft.
        limits: [S] most rows of each, at most K.
        before: [S] what each had before.
        num_rounds: sessions whose round the step may have, with a drafter or without: a token each.
        num_other_rows: rows of the step beside drafts.
        forward_s: time of each row count, from 0 on; its end is the most rows of a step.
    """
    num_places = gains.shape[1]
    places = np.arange(num_places)
    preferred = np.where(places < before[:, None], gains * INCUMBENTS_EDGE, gains)  # [S, K]
    preferred = np.where(places < limits[:, None], preferred, 0.0)
    most = max(0, min(len(forward_s) - 1 - num_other_rows, int(limits.sum())))  # M
    if most == 0:
        return np.zeros(len(gains), dtype=np.int64)
    order = np.argsort(-preferred, axis=None, kind="stable")[:most]  # earlier places of a draft first among equals
    if len(gains) == 1 and num_rounds == 1:
        return np.array([len(order)])
    tokens = num_rounds + np.concatenate(([0.0], gains.reshape(-1)[order].cumsum()))  # [1 + M]
    rates = tokens / forward_s[num_other_rows : num_other_rows + len(order) + 1]
    num_rows = int(rates.argmax())
    num_before = min(int(np.minimum(before, limits).sum()), len(order))
    if rates[num_before] * WORTH_A_CHANGE >= rates[num_rows] and rates[num_before] >= rates[0]:
        num_rows = num_before
    return np.bincount(order[:num_rows] // max(1, num_places), minlength=len(gains))
