"""How often guesses of a given confidence turn out right. Pure counting; knows neither models nor lookups.

A proposer says how sure it is (a probability, a match length); what that is worth is measured, since models are
overconfident and texts differ. Each class of confidence keeps an exponentially forgetting mean that starts at a prior.
"""

import bisect
from collections.abc import Sequence


class AcceptanceByConfidence:
    """Acceptance measured for classes of confidence.

    Args:
        edges: ascending lower edges of the classes after the first; `len(edges) + 1` classes.
        priors: expected acceptance of each class before anything is measured.
        prior_weight: how many observations a prior counts for.
        memory: observations after which an old one weighs 1/e.
    """

    def __init__(self, edges: Sequence[float], priors: Sequence[float], prior_weight: float, memory: float) -> None:
        if len(priors) != len(edges) + 1:
            raise ValueError("one prior for each class of confidence")
        self._edges = list(edges)
        self._num_right = [prior * prior_weight for prior in priors]
        self._num_judged = [prior_weight] * len(priors)
        self._keep = 1.0 - 1.0 / memory

    def estimate(self, confidence: float) -> float:
        """Probability that a guess of this confidence is accepted, given that it is reached."""
        index = bisect.bisect_right(self._edges, confidence)
        return self._num_right[index] / self._num_judged[index]

    def observe(self, confidence: float, right: bool) -> None:
        """A guess of this confidence was reached and was right, or not."""
        index = bisect.bisect_right(self._edges, confidence)
        self._num_right[index] = self._num_right[index] * self._keep + right
        self._num_judged[index] = self._num_judged[index] * self._keep + 1.0

    def observe_chain(self, confidences: Sequence[float], num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A chain was judged up to its first wrong guess; what lies behind that one was never reached."""
        num_reached = min(num_draft_tokens, num_accepted_tokens + 1, len(confidences))
        for index in range(num_reached):
            self.observe(confidences[index], index < num_accepted_tokens)
