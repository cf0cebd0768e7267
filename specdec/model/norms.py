"""RMSNorm in one pass over each row, in place of ten calls.

A row's sum of squares is taken by the same code whatever rows are beside it. Knows float32 on a CPU; elsewhere torch's
own function is as good.

Legend: M rows, F features.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit
from torch import Tensor, nn

from specdec import openmp

NORM_KERNEL = "rms-norm v1"
"""Name and version: the version rises with every change that can change a bit."""
_JOB = np.dtype(
    [*((name, np.int64) for name in ("x", "weight", "out", "rows", "features")), ("epsilon", np.float64)], align=True
)
_WORK_OF_ONE_THREAD = 1 << 15  # elements


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _sum_of_squares(x: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@openmp.kernel(_JOB)
def _rms_norm(arguments: Any) -> None:
    job = carray(arguments, 1)[0]
    weight = carray(openmp.pointer(np.uintp(job.weight)), (job.features,), np.float32)
    for row in range(openmp.part_index(), job.rows, openmp.num_parts()):
        offset = 4 * row * job.features
        x = carray(openmp.pointer(np.uintp(job.x + offset)), (job.features,), np.float32)
        out = carray(openmp.pointer(np.uintp(job.out + offset)), (job.features,), np.float32)
        mean = _sum_of_squares(x) / np.float32(job.features)
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(job.epsilon))
        for i in range(job.features):
            out[i] = x[i] * scale * weight[i]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension. For one thread at a time."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon, self.shape = nn.Parameter(weight, requires_grad=False), epsilon, tuple(weight.shape)
        self._job = np.zeros(1, _JOB)
        self._job["features"], self._job["epsilon"] = weight.numel(), epsilon
        self._numbers = self._job.view(np.int64)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype != torch.float32 or self.weight.dtype != torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.epsilon)
        x = x.contiguous()
        out = torch.empty_like(x)
        numbers = self._numbers
        numbers[0], numbers[1], numbers[2] = x.data_ptr(), self.weight.data_ptr(), out.data_ptr()
        numbers[3] = x.numel() // self.shape[0]
        openmp.run(_rms_norm, self._job, alone=x.numel() < _WORK_OF_ONE_THREAD)
        return out
