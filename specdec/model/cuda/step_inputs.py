"""The integers of one forward, in one buffer: one copy to the device, at addresses that a graph can keep.

Per row a fixed number of int32, section after section, then a tail of block tables and paths that rows point into. The
sections' places follow from the number of rows alone. Knows no model; works on any device.

Legend: M rows with padding.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_HOST_BUFFERS = 2  # one is filled while the copy of the other may still wait for the device


@dataclasses.dataclass(frozen=True)
class RowArrays:
    """[M] int32 each, but for `indices`, on the device. What padding rows hold comes after the meaning."""

    token_ids: Tensor  # 0
    positions: Tensor  # 0
    wanted_rows: Tensor  # whose logits are asked for; behind those, row 0
    write_slots: Tensor  # block * 16 + place of the row's own key; -1
    num_keys: Tensor  # 0
    num_direct_keys: Tensor  # so many of the keys lie in the cache's slots of their own number; 0
    table_starts: Tensor  # where the session's block table begins in `indices`; 0
    ancestor_starts: Tensor  # where the slots of the row's other keys begin in `indices`; 0
    indices: Tensor  # all that is left of the buffer


_SECTIONS = {
    field.name: (-1 if field.name == "write_slots" else 0)
    for field in dataclasses.fields(RowArrays)
    if field.name != "indices"
}


class StepInputs:
    """Buffers for forwards of up to `max_rows` rows whose tables and paths have up to `max_indices` entries."""

    def __init__(self, max_rows: int, max_indices: int, device: torch.device) -> None:
        size = len(_SECTIONS) * max_rows + max_indices
        on_cuda = device.type == "cuda"
        self._max_rows = max_rows
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda) for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._copied = [_event() if on_cuda else None for _ in range(_NUM_HOST_BUFFERS)]
        self._turn = 0

    def views(self, num_rows: int) -> RowArrays:
        """The device's arrays of a forward of `num_rows` rows: always at the same addresses."""
        end = len(_SECTIONS) * num_rows
        sections = self._device_buffer[:end].view(len(_SECTIONS), num_rows)
        return RowArrays(**dict(zip(_SECTIONS, sections, strict=True)), indices=self._device_buffer[end:])

    def fill(self, num_rows: int, arrays: Mapping[str, NDArray[np.integer]], indices: NDArray[np.int32]) -> RowArrays:
        """Copies the arrays, each of up to `num_rows` entries, and their padding to the device.

        Returns at once; the copy is queued before whatever is launched next on this stream. Raises ValueError where
        something does not fit.
        """
        end = len(_SECTIONS) * num_rows
        if num_rows > self._max_rows or end + len(indices) > len(self._device_buffer):
            raise ValueError(f"{num_rows} rows and {len(indices)} indices do not fit the buffers of a forward")
        self._turn = (self._turn + 1) % _NUM_HOST_BUFFERS
        host, copied = self._host_buffers[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # what was copied from this buffer has reached the device
        packed = host.numpy()
        for (name, padding), section in zip(_SECTIONS.items(), packed[:end].reshape(-1, num_rows), strict=True):
            values = arrays[name]
            section[: len(values)] = values
            section[len(values) :] = padding
        used = end + len(indices)
        packed[end:used] = indices
        self._device_buffer[:used].copy_(host[:used], non_blocking=True)
        if copied is not None:
            copied.record()
        return self.views(num_rows)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
