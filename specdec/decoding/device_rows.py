"""Rows of a device's logits, brought to the host.

Through one buffer of pinned memory that grows: to pageable memory a device copies at a fraction of the bus's speed,
and a row has a value for every token of the vocabulary. Called from the thread that owns the device.

Shapes: W wanted rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostRows:
    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """[W, V] on the host: the caller's until the next `take`."""
        chosen = logits.index_select(0, torch.tensor(rows, dtype=torch.long).to(logits.device))
        if chosen.numel() > self._buffer.numel() or chosen.dtype != self._buffer.dtype:
            self._buffer = torch.empty(2 * chosen.numel(), dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        on_host = self._buffer[: chosen.numel()].view(chosen.shape)
        on_host.copy_(chosen)  # waits for the device
        return on_host
