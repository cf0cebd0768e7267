"""Keys and values of one session: one contiguous tensor that grows by doubling.

Knows slots and lengths; refuses to know tokens. Rolling back is moving `length`: what lies beyond it is never read
except under a mask, so it only has to be finite.

Legend: N layers, H key-value heads, C capacity in slots, D head size.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

SLOT_BLOCK = 64  # attention reads keys in multiples of this many slots
_FIRST_CAPACITY = 256


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    context_limit: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize


class KVCache:
    """Slots [0, length) hold the keys and values of the session's first `length` positions."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._length = 0
        self._slots = self._allocate(0)  # [2, N, H, C, D]

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self._slots.shape[3]

    @property
    def num_bytes(self) -> int:
        return self._slots.numel() * self._slots.element_size()

    def layer(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, C, D] of a layer, to read and to write in place."""
        return self._slots[0, layer_index], self._slots[1, layer_index]

    @torch.inference_mode()
    def reserve(self, num_slots: int) -> None:
        """Makes room for `num_slots` slots in all. Raises ValueError beyond the context limit."""
        if num_slots > self.layout.context_limit:
            raise ValueError(f"{num_slots} positions do not fit a context of {self.layout.context_limit}")
        if num_slots <= self.capacity:
            return
        capacity = max(num_slots, _FIRST_CAPACITY, min(2 * self.capacity, self.layout.context_limit))
        grown = self._allocate(-(-capacity // SLOT_BLOCK) * SLOT_BLOCK)
        grown[:, :, :, : self._length] = self._slots[:, :, :, : self._length]
        self._slots = grown

    def extend(self, num_slots: int) -> None:
        """Counts `num_slots` slots, written beyond the old length, as part of the cache."""
        if not 0 <= num_slots <= self.capacity - self._length:
            raise ValueError("slots must be reserved before they are counted")
        self._length += num_slots

    def rollback(self, length: int) -> None:
        """Forgets every position from `length` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"a cache of {self._length} positions cannot be rolled back to {length}")
        self._length = length

    @torch.inference_mode()
    def compact(self, base_length: int, kept_rows: Sequence[int]) -> None:
        """After a tree: keeps, of the rows appended at `base_length`, those of one path, moved next to each other.

        Row r of the forward lies in slot base_length + r. `kept_rows` ascend, as any path from a root does.
        """
        slots = [base_length + row for row in kept_rows]
        ascending = all(left < right for left, right in itertools.pairwise(slots))
        if base_length < 0 or not ascending or (slots and not base_length <= slots[0] <= slots[-1] < self._length):
            raise ValueError("kept rows must ascend and lie between the base length and the cache's length")
        end = base_length + len(slots)
        if slots and slots[-1] >= end:
            self._slots[:, :, :, base_length:end] = self._slots[:, :, :, slots]
        self.rollback(end)

    def free(self) -> None:
        """Gives the memory back. The cache is then empty."""
        self._length = 0
        self._slots = self._allocate(0)

    def _allocate(self, capacity: int) -> Tensor:
        layout = self.layout
        shape = (2, layout.num_layers, layout.num_kv_heads, capacity, layout.head_size)
        # Zeros, not garbage: a masked slot is multiplied by 0, and 0 times NaN is NaN.
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)
