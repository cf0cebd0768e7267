"""How long a verifier takes for a number of rows, learned from the verdicts of all sessions at that verifier.

A forward pass is flat up to some row count and then climbs in steps whose places depend on the machine, so the shape is
measured, never assumed: latency = level * shape(rows). The level follows the verifier's load quickly; the shape holds a
value for each row count that was tried, is kept non-decreasing, and forgets slowly. A row count never tried is taken to
cost as much as its lower neighbour where that was tried, else what interpolation says, or, beyond all that was tried,
what the average slope says: optimistic guesses, put right by the first try. Pure: times are arguments.
"""

import bisect
import dataclasses

LEVEL_GAIN = 0.1
SHAPE_MIN_GAIN = 0.15
MAX_JUMP = 4.0
"""A first try is believed up to this ratio to what was expected: one stalled round must not close a row count."""
MAX_SURPRISE = 2.0
"""The same for row counts that are known already."""
SHAPE_KEEP = 0.998
OPTIMISM_WEIGHT = 0.4
MAX_WEIGHT = 8.0


@dataclasses.dataclass
class _Tried:
    ratio: float
    weight: float


class VerifyTimes:
    """Expected time from a draft's departure to its verdict, in seconds, by rows (draft tokens + 1)."""

    def __init__(self) -> None:
        self._level_s = 0.0
        self._tried: dict[int, _Tried] = {}
        self._rows: list[int] = []
        self._ratios: list[float] = []

    @property
    def max_tried_rows(self) -> int:
        """Most rows ever observed; 0 before any."""
        return self._rows[-1] if self._rows else 0

    def was_tried(self, num_rows: int) -> bool:
        """Whether this very row count was observed."""
        return num_rows in self._tried

    def observe(self, num_rows: int, latency_s: float) -> None:
        """A verdict on `num_rows` rows took this long."""
        if not self._tried:
            self._level_s = latency_s
            self._tried[num_rows] = _Tried(1.0, 1.0)
        else:
            self._learn(num_rows, latency_s)
        self._fit()

    def _learn(self, num_rows: int, latency_s: float) -> None:
        expected_s = self.expected_s(num_rows)
        tried = self._tried.get(num_rows)
        for other in self._tried.values():
            other.weight *= SHAPE_KEEP
        if tried is None:
            believed_s = min(latency_s, MAX_JUMP * expected_s)
            self._tried[num_rows] = _Tried(believed_s / self._level_s, 1.0)
            return
        believed_s = min(max(latency_s, expected_s / MAX_SURPRISE), MAX_SURPRISE * expected_s)
        tried.weight = min(tried.weight + 1.0, MAX_WEIGHT)
        gain = max(1.0 / tried.weight, SHAPE_MIN_GAIN)
        tried.ratio += gain * (believed_s / self._level_s - tried.ratio)
        self._level_s *= 1.0 + LEVEL_GAIN * (believed_s / expected_s - 1.0)

    def _fit(self) -> None:
        """The shape: what was tried, leaning to the next lower count where evidence is old, made non-decreasing."""
        self._rows = sorted(self._tried)
        blocks: list[tuple[float, float, int]] = []  # (ratio, weight, row counts pooled)
        for row in self._rows:
            tried = self._tried[row]
            share = tried.weight / (tried.weight + OPTIMISM_WEIGHT) if blocks else 1.0
            ratio = share * tried.ratio + (1.0 - share) * (blocks[-1][0] if blocks else tried.ratio)
            weight, count = tried.weight, 1
            while blocks and blocks[-1][0] > ratio:  # pool adjacent violators
                below, below_weight, below_count = blocks.pop()
                ratio = (ratio * weight + below * below_weight) / (weight + below_weight)
                weight, count = weight + below_weight, count + below_count
            blocks.append((ratio, weight, count))
        self._ratios = [ratio for ratio, _, count in blocks for _ in range(count)]

    def expected_s(self, num_rows: int) -> float:
        """Expected latency; 0.0 before anything was observed."""
        if not self._rows:
            return 0.0
        index = bisect.bisect_left(self._rows, num_rows)
        if index == 0 or (index < len(self._rows) and self._rows[index] == num_rows):
            return self._level_s * self._ratios[index]
        if index < len(self._rows):
            low, high = self._rows[index - 1], self._rows[index]
            share = (num_rows - low) / (high - low) if num_rows > low + 1 else 0.0
            return self._level_s * (self._ratios[index - 1] * (1 - share) + self._ratios[index] * share)
        tried_span = self._rows[-1] - self._rows[0]
        slope = (self._ratios[-1] - self._ratios[0]) / tried_span if tried_span else 0.0
        return self._level_s * (self._ratios[-1] + slope * (num_rows - self._rows[-1]))
