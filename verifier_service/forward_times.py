"""How long a forward takes for a number of rows, learned from the forwards that ran.

Measured, never assumed: flat while the weights are what is read, climbing once the rows themselves cost. More rows
never take less time, so measurements that say otherwise are pooled (isotonic regression, pool adjacent violators). A
stalled forward counts for little, and what was measured long ago gives way to what is measured now. Pure: times are
arguments.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

MIN_GAIN = 1 / 16
"""Of the newest measurement of a row count, once there are many."""
MAX_SURPRISE = 2.0
"""No measurement counts for more than this times what was expected: forwards stall, none is too quick."""
MAX_WEIGHT = 32.0
KEEP = 0.99
"""What is left of the weight of every other row count after a measurement: it counts only where both disagree."""
EXACT_BITS = 4
"""Row counts below 2^EXACT_BITS are told apart; above, those whose first EXACT_BITS bits agree count as one."""


@dataclasses.dataclass
class _Measured:
    num_rows: float
    forward_s: float
    weight: float = 1.0
    num_measurements: int = 1


class ForwardTimes:
    """Expected time of a forward by its rows."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._table: NDArray[np.float64] = np.zeros(0)

    @property
    def is_known(self) -> bool:
        """Whether any forward was measured."""
        return bool(self._measured)

    def observe(self, num_rows: int, forward_s: float) -> None:
        """A forward over so many rows took this long; 0 where the clock could not tell, which says nothing."""
        if forward_s <= 0:
            return
        group = _group(num_rows)
        expected_s = self.expected_s(num_rows)
        for other in self._measured.values():
            other.weight *= KEEP
        known = self._measured.get(group)
        believed_s = min(forward_s, MAX_SURPRISE * expected_s) if expected_s > 0 else forward_s
        if known is None:
            self._measured[group] = _Measured(num_rows, believed_s)
        else:
            known.num_measurements += 1
            gain = max(1 / known.num_measurements, MIN_GAIN)
            known.forward_s += gain * (believed_s - known.forward_s)
            known.num_rows += gain * (num_rows - known.num_rows)
            known.weight = min(known.weight + 1, MAX_WEIGHT)
        self._table = np.zeros(0)

    def expected_s(self, num_rows: int) -> float:
        """Expected time; 0.0 before anything was measured."""
        return float(self.table(max(num_rows, len(self._table) - 1))[num_rows]) if self._measured else 0.0

    def table(self, max_rows: int) -> NDArray[np.float64]:
        """[max_rows + 1] expected time of each row count, non-decreasing; that of no row is that of one.

        Between measured counts by interpolation, beyond them by the slope of the last two: no measured slope, no slope,
        which is optimistic, and put right by the first forward there.
        """
        if len(self._table) <= max_rows:
            self._table = self._fit(max_rows)
        return self._table[: max_rows + 1]

    def _fit(self, max_rows: int) -> NDArray[np.float64]:
        blocks: list[list[float]] = []  # [time, weight, places pooled]
        measured = [self._measured[group] for group in sorted(self._measured)]
        for one in measured:
            block = [one.forward_s, one.weight, 1]
            while blocks and blocks[-1][0] > block[0]:
                below = blocks.pop()
                weight = below[1] + block[1]
                block = [(below[0] * below[1] + block[0] * block[1]) / weight, weight, below[2] + block[2]]
            blocks.append(block)
        rows = [one.num_rows for one in measured]
        times = [time_s for time_s, _, num_pooled in blocks for _ in range(int(num_pooled))]
        if not rows:
            return np.zeros(max_rows + 1)
        if len(rows) > 1 and rows[-1] < max_rows:
            slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
            times.append(times[-1] + slope * (max_rows - rows[-1]))
            rows.append(max_rows)
        table = np.interp(np.arange(max_rows + 1), rows, times)
        table[0] = table[min(1, max_rows)]
        return table


def _group(num_rows: int) -> int:
    shift = max(0, num_rows.bit_length() - EXACT_BITS)
    return num_rows >> shift << shift
