"""How many rows a matrix product may have, so that a row's bits do not depend on its neighbours.

A kernel picks its inner loop by the number of rows. Rows computed by the same loop agree to the bit; `self_check` finds
the counts that do on the device at hand. This room only pads up to the next of them and splits at the largest.
"""

from collections.abc import Iterable

from torch import Tensor


class RowCounts:
    """The counts that linear layers may run on. Shared by many layers and replaced in place once they are known.

    Until then every count up to `max_rows` is allowed, which is right for drafts: they need speed, not bits.
    """

    def __init__(self, max_rows: int) -> None:
        self.use(range(1, max_rows + 1))

    def use(self, counts: Iterable[int]) -> None:
        self.counts = tuple(sorted(set(counts)))
        if not self.counts or self.counts[0] < 1:
            raise ValueError("row counts are positive, and at least one is needed")
        self.largest = self.counts[-1]
        self._next = [next(count for count in self.counts if count >= rows) for rows in range(self.largest + 1)]

    def padded(self, rows: int) -> int:
        """The smallest number of rows, at least `rows`, that is made of allowed counts only."""
        full_blocks, rest = divmod(rows, self.largest)
        return full_blocks * self.largest + (self._next[rest] if rest else 0)


def split_rows(x: Tensor, block_rows: int) -> list[Tensor]:
    """Views of x, at most `block_rows` rows each."""
    return [x[start : start + block_rows] for start in range(0, x.shape[0], block_rows)]
