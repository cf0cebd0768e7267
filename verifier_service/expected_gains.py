"""What a row that is spent on a draft brings: expected tokens by session and place in the draft, as measured.

The gain at a place is how often a draft token there was accepted, of the drafts that reached so far: the value of one
more row of the verifier, whoever chose the draft's length and why. Sessions begin at a prior, and drift back to it
while they send no drafts, so that drafts are tried again some time. Pure numbers: no sessions, no time.

Shapes: S slots, K places of a draft.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PRIOR_ACCEPTANCE = 0.7
"""Of a draft token of which nothing is known, given that those before it were accepted."""
PRIOR_WEIGHT = 4.0
"""In drafts."""
KEEP_PER_DRAFT = 1 - 1 / 24
KEEP_PER_IDLE_ROUND = 1 - 1 / 512
"""What is left of older evidence after a round with and without a draft."""

Gains = NDArray[np.float64]


class ExpectedGains:
    """A slot for each session, numbered from 0 and used again."""

    def __init__(self, num_places: int) -> None:
        self._places = np.arange(num_places)  # [K]
        self._num_drafted: Gains = np.zeros((0, num_places))  # [S, K] drafts that reached a place
        self._num_accepted: Gains = np.zeros((0, num_places))  # [S, K] of those, accepted there
        self._free_slots: list[int] = []

    def add(self) -> int:
        """A slot at the prior."""
        if not self._free_slots:
            num_slots = len(self._num_drafted)
            grown = np.zeros((max(8, num_slots), len(self._places)))
            self._num_drafted = np.concatenate((self._num_drafted, grown))
            self._num_accepted = np.concatenate((self._num_accepted, grown))
            self._free_slots = list(range(len(self._num_drafted) - 1, num_slots - 1, -1))
        return self._free_slots.pop()

    def remove(self, slot: int) -> None:
        """The slot may be used again."""
        self._num_drafted[slot] = self._num_accepted[slot] = 0.0
        self._free_slots.append(slot)

    def observe(self, slots: Sequence[int], num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """One round of each slot, its draft's depth and how far it was accepted; depth 0 is a round without a draft."""
        depths = np.asarray(num_drafted)[:, None]  # [rounds, 1]
        keep = np.where(depths > 0, KEEP_PER_DRAFT, KEEP_PER_IDLE_ROUND)
        self._num_drafted[slots] = self._num_drafted[slots] * keep + (self._places < depths)
        self._num_accepted[slots] = self._num_accepted[slots] * keep + (
            self._places < np.asarray(num_accepted)[:, None]
        )

    def of(self, slots: Sequence[int]) -> Gains:
        """[slots, K] expected tokens of a row at each place: non-increasing, in (0, 1)."""
        drafted, accepted = self._num_drafted[slots], self._num_accepted[slots]
        num_right = accepted.sum(axis=1, keepdims=True)
        # A draft is judged at every place that it passed and at the one after.
        num_judged = num_right + (drafted - accepted).max(axis=1, keepdims=True, initial=0.0)
        acceptance = (num_right + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (num_judged + PRIOR_WEIGHT)  # [slots, 1]
        prior = acceptance ** (1 + self._places)
        gains: Gains = (accepted + PRIOR_WEIGHT * prior) / (drafted + PRIOR_WEIGHT)
        return np.minimum.accumulate(gains, axis=1)
