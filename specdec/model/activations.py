"""Activations in compiled code that treats every row alike.

torch runs elementwise work through vectors, and what is left at the end of a thread's share through scalar code whose
exponential differs in the last bit: a row's SiLU then depends on how many rows and threads there are. Here a row is
always cut at the same places. Knows curves; refuses to know which model they belong to.

Legend: M rows, F features.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit
from torch import Tensor, nn

from specdec import openmp
from specdec.model.row_counts import split_rows
from specdec.model.simd import EXP2_SERIES

ACTIVATION_KERNELS = "activations v1"
"""Name and version, of `in_row_blocks` too: the version rises with every change that can change a bit."""

Curve = Literal["silu", "gelu_tanh", "tanh", "sigmoid"]

_CURVES: tuple[Curve, ...] = ("silu", "gelu_tanh", "tanh", "sigmoid")
_COLUMNS = 2048  # a share of a row, for one thread
_WORK_OF_ONE_THREAD = 1 << 14  # elements
_ONE_TORCH_THREAD = 32767  # elements; torch splits larger elementwise work between threads
VECTORS = 64  # elements; torch's vector loops take at most so many in a turn
_JOB = np.dtype(
    [
        *((name, np.int64) for name in ("x", "out", "rows", "features", "x_stride", "times", "curve")),
        ("scale", np.float64),
    ],
    align=True,
)


_compiled = njit(error_model="numpy")


@_compiled  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e to the x for x <= 0, within two units in the last place; never below 2**-126. Free of branches."""
    exponent = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    whole = np.floor(exponent + np.float32(0.5))
    rest = exponent - whole
    series = EXP2_SERIES[0]
    series = series * rest + EXP2_SERIES[1]
    series = series * rest + EXP2_SERIES[2]
    series = series * rest + EXP2_SERIES[3]
    series = series * rest + EXP2_SERIES[4]
    series = series * rest + EXP2_SERIES[5]
    series = series * rest + EXP2_SERIES[6]
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled  # type: ignore[untyped-decorator]
def _tanh(x: Any) -> Any:
    decay = _exp(np.float32(-2.0) * abs(x))
    size = (np.float32(1.0) - decay) / (np.float32(1.0) + decay)
    return size if x >= 0 else -size


@_compiled  # type: ignore[untyped-decorator]
def _sigmoid(x: Any) -> Any:
    decay = _exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else decay) / (np.float32(1.0) + decay)


@_compiled  # type: ignore[untyped-decorator]
def _gelu(x: Any) -> Any:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + _tanh(inner))


@openmp.kernel(_JOB)
def _activate(arguments: Any) -> None:
    """out = curve(x), times what stands F columns further right where `times` is set."""
    job = carray(arguments, 1)[0]
    num_shares = (job.features + _COLUMNS - 1) // _COLUMNS
    scale = np.float32(job.scale)
    for item in range(openmp.part_index(), job.rows * num_shares, openmp.num_parts()):
        row, first = item // num_shares, item % num_shares * _COLUMNS
        count = min(_COLUMNS, job.features - first)
        x = carray(openmp.pointer(np.uintp(job.x + 4 * (row * job.x_stride + first))), (count,), np.float32)
        out = carray(openmp.pointer(np.uintp(job.out + 4 * (row * job.features + first))), (count,), np.float32)
        if job.curve == 0:
            for i in range(count):
                out[i] = x[i] * _sigmoid(x[i])
        elif job.curve == 1:
            for i in range(count):
                out[i] = _gelu(x[i])
        elif job.curve == 2:
            for i in range(count):
                out[i] = scale * _tanh(x[i] / scale)
        else:
            for i in range(count):
                out[i] = _sigmoid(x[i])
        if job.times != 0:
            right = job.x + 4 * (row * job.x_stride + job.features + first)
            factor = carray(openmp.pointer(np.uintp(right)), (count,), np.float32)
            for i in range(count):
                out[i] *= factor[i]


def activate(x: Tensor, curve: Curve, *, gated: bool = False, scale: float = 1.0) -> Tensor:
    """curve(x) for x [..., F] in float32 on the CPU; `scale * _tanh(x / scale)` for "tanh".

    `gated`: x is [..., 2 F], and curve(left half) * right half is given.
    """
    width = x.shape[-1]
    features = width // 2 if gated else width
    out = torch.empty(*x.shape[:-1], features)
    x = x.contiguous()
    job = np.zeros(1, _JOB)
    job[0] = (
        x.data_ptr(),
        out.data_ptr(),
        out.numel() // features,
        features,
        width,
        gated,
        _CURVES.index(curve),
        scale,
    )
    openmp.run(_activate, job, alone=out.numel() < _WORK_OF_ONE_THREAD)
    return out


@functools.cache
def _probe() -> Tensor:
    return torch.linspace(-6.0, 6.0, 301)


def curve_of(activation: nn.Module) -> Curve | None:
    """The curve that an activation computes, tried on numbers; None for any other."""
    expected: dict[Curve, Tensor] = {
        "silu": F.silu(_probe()),
        "gelu_tanh": F.gelu(_probe(), approximate="tanh"),
        "tanh": torch.tanh(_probe()),
        "sigmoid": torch.sigmoid(_probe()),
    }
    values = activation(_probe())
    return next((curve for curve, known in expected.items() if torch.allclose(values, known, atol=1e-6)), None)


def in_row_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an elementwise function of torch, over blocks of rows that it cuts at no place of its own."""
    x = x.contiguous()  # torch walks through strided rows in another way than through a single one
    rows = x.view(-1, x.shape[-1])
    block_rows = max(1, _ONE_TORCH_THREAD // x.shape[-1])
    if x.shape[-1] % VECTORS:  # a row's end would lie elsewhere in a vector
        block_rows = 1
    elif rows.shape[0] <= block_rows:
        return function(x)
    return torch.cat([function(block) for block in split_rows(rows, block_rows)]).view(x.shape)


class RowActivation(nn.Module):
    """An activation that gives a row the same bits whatever rows are beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.curve = inner, curve_of(inner)

    def forward(self, x: Tensor) -> Tensor:
        if self.curve is not None and x.dtype == torch.float32:
            return activate(x, self.curve)
        return in_row_blocks(self.inner, x)


class GatedActivation(nn.Module):
    """activation(gate) * up for [..., 2 F] that holds gate and up side by side, on any device."""

    def __init__(self, activation: nn.Module, *, on_cpu: bool) -> None:
        super().__init__()
        self.activation = RowActivation(activation) if on_cpu else activation
        self.curve = curve_of(activation) if on_cpu else None

    def forward(self, gate_up: Tensor) -> Tensor:
        if self.curve is not None and gate_up.dtype == torch.float32:
            return activate(gate_up, self.curve, gated=True)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up  # type: ignore[no-any-return]
