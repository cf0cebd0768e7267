"""How long an attach may take until a second drafter is tried, learned from attaches that came through. Pure.

As a transport guesses its retransmission time (RFC 6298): a smoothed time plus four times its smoothed deviation. Kept
for each verifier, which answers between two forward passes and so decides most of that time.
"""

from dataclasses import dataclass

MIN_DELAY_S = 0.1
"""Less tells of a busy moment more than of a drafter."""
MAX_DELAY_S = 5.0
_UNKNOWN_DELAY_S = 1.0
_GAIN, _DEVIATION_GAIN = 1 / 8, 1 / 4


@dataclass(frozen=True)
class HedgeDelay:
    """What is known of one verifier's attaches; unmeasured at first."""

    smoothed_s: float | None = None
    deviation_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """From the first attempt to the second."""
        if self.smoothed_s is None:
            return _UNKNOWN_DELAY_S
        return min(max(self.smoothed_s + 4 * self.deviation_s, MIN_DELAY_S), MAX_DELAY_S)

    def observed(self, attach_s: float) -> "HedgeDelay":
        """An attach came through after this time."""
        if self.smoothed_s is None:
            return HedgeDelay(attach_s, attach_s / 2)
        deviation_s = self.deviation_s + _DEVIATION_GAIN * (abs(attach_s - self.smoothed_s) - self.deviation_s)
        return HedgeDelay(self.smoothed_s + _GAIN * (attach_s - self.smoothed_s), deviation_s)
