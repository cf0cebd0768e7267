"""Rotary angles from tables, so that a position's bits depend on the position alone, and no forward computes them anew.

The tables are made by the model's own module, a fixed number of positions at a time: in one call over all positions of
a batch, torch would cut the work of many rows between threads, and the elements at a cut go through other code.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ModelLoadError

_POSITIONS = 128  # of one call: 32768 elements, which torch does on one thread, for heads of up to 256


class RotaryTable(nn.Module):
    """Stands in for a rotary embedding: cosines and sines [1, M, D] of positions [1, M]. Tables grow as needed."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: Any, **named: Any) -> tuple[Tensor, Tensor]:
        key = (x.dtype, *layer_type, *named.values())
        end = int(position_ids.max()) + 1
        table = self._tables.get(key)
        if table is None or table[0].shape[0] < end:
            table = self._tables[key] = self._grown(table, end, x, layer_type, named)
        return table[0][position_ids], table[1][position_ids]

    def _grown(
        self,
        table: tuple[Tensor, Tensor] | None,
        end: int,
        x: Tensor,
        layer_type: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        start = 0 if table is None else table[0].shape[0]
        end = max(end, 2 * start)  # so that growing costs little in all
        parts = [] if table is None else [table]
        for first in range(start, end, _POSITIONS):
            positions = torch.arange(first, first + _POSITIONS, device=x.device)[None]
            angles = self.source(x, positions, *layer_type, **named)
            if not isinstance(angles, tuple):
                raise ModelLoadError(f"{type(self.source).__name__} does not give cosines and sines")
            cosines, sines = angles
            parts.append((cosines[0], sines[0]))
        return torch.cat([cosines for cosines, _ in parts]), torch.cat([sines for _, sines in parts])
