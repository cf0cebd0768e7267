"""RMSNorm in one kernel, a row to a program: the bits of a row cannot depend on how many there are.

torch's own mean over the last dimension shares a row's sum among more threads where rows are few. Everything is float32
until the end, where modelling code may round in between.
"""

# Triton reads the names and types of kernels' arguments in its own way.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

CUDA_NORM_KERNEL = "triton-rms-norm v1"
"""Name and version: the version rises with every change that can change a bit."""


@triton.jit
def _rms_norm(
    x,  # [M, F]
    weight,  # [F] float32
    output,  # [M, F]
    EPSILON: tl.constexpr,
    F: tl.constexpr,
    PADDED_F: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, PADDED_F)
    values = tl.load(x + row * F + f, mask=f < F, other=0.0).to(tl.float32)
    normalised = values * tl.rsqrt(tl.sum(values * values) / F + EPSILON)
    scaled = normalised * tl.load(weight + f, mask=f < F, other=0.0)
    tl.store(output + row * F + f, scaled.to(output.dtype.element_ty), mask=f < F)


class TritonRMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight.float(), epsilon  # no parameter: those are cast to the compute dtype
        self.num_warps = 4 if weight.numel() <= 2048 else 8

    def forward(self, x: Tensor) -> Tensor:
        num_features = x.shape[-1]
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        num_rows = x.numel() // num_features
        if num_rows:
            _rms_norm[(num_rows,)](
                x.contiguous(),
                self.weight,
                output,
                EPSILON=self.epsilon,
                F=num_features,
                PADDED_F=triton.next_power_of_2(num_features),
                num_warps=self.num_warps,
            )
        return output
