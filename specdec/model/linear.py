"""Linear layers on the fastest kernel of the device, over row counts that keep the bits.

Knows our own product of independent rows, torch's packed kernels (oneDNN bfloat16, FBGEMM int8, int4 groups) and plain
`F.linear` for the rest. Refuses to know which model the layers belong to. Kernels differ in their last bits, so a model
uses one throughout.

Legend: M rows, I input features, O output features.
"""

import dataclasses
import platform
import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ModelLoadError
from specdec.model.row_counts import RowCounts, split_rows
from specdec.model.row_product import ROW_PRODUCT_KERNEL, PackedWeights

Quantization = Literal["none", "int8", "int4"]


class RowLinear(nn.Module):
    """A linear layer that runs its kernel on allowed row counts only: pads up to the next, splits at the largest."""

    def __init__(self, weight: Tensor, bias: Tensor | None, counts: RowCounts) -> None:
        """Takes weight [O, I] and bias [O]; the caller need not keep them."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.counts = counts
        self.pack(weight, bias)

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keeps weight [O, I] and bias [O] in the kernel's own layout."""
        raise NotImplementedError

    def multiply(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] on the kernel as it is, whatever the number of rows."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows <= self.counts.largest and self.counts.padded(rows) == rows:
            return self.multiply(x) if rows else x.new_empty(*x.shape[:-1], self.out_features)
        flat = F.pad(x.reshape(rows, self.in_features), (0, 0, 0, self.counts.padded(rows) - rows))
        blocks = [self.multiply(block) for block in split_rows(flat, self.counts.largest)]
        return torch.cat(blocks)[:rows].view(*x.shape[:-1], self.out_features)


class PlainLinear(RowLinear):
    """`F.linear`, on any device and in any dtype."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class IndependentRowsLinear(RowLinear):
    """Weights as they are stored, float32 activations and sums; exact on any number of rows by construction."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        smallest, largest = torch.aminmax(weight)
        if not (smallest.isfinite() and largest.isfinite()):
            name = str(weight.dtype).removeprefix("torch.")
            raise ModelLoadError(f"a weight does not fit {name}; load the model in another dtype")
        self.packed = PackedWeights(weight, bias)

    def multiply(self, x: Tensor) -> Tensor:
        return self.packed.multiply(x)


class OnednnBfloat16Linear(RowLinear):
    """bfloat16 weights and activations, packed once for the processor's own instructions (AVX512-BF16, AMX)."""

    EXPECTED_ROWS = 16  # a hint for the layout, not a bound

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), self.EXPECTED_ROWS)
        self.bias = None if bias is None else bias.bfloat16()

    def multiply(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


class QuantizedLinear(IndependentRowsLinear):
    """Rounded weights for a few rows, 16-bit weights for many.

    A draft step reads all weights for a row or two, so small weights are its speed. A prefill is bound by arithmetic,
    where they gain nothing; and one large activation among its rows would cost all of them their precision.
    """

    MOST_ROWS = 4

    def pack(self, weight: Tensor, bias: Tensor | None) -> None:
        super().pack(weight.half() if weight.dtype == torch.float32 else weight, bias)
        self.pack_quantized(weight.float(), bias)

    def multiply(self, x: Tensor) -> Tensor:
        few = x.numel() <= self.MOST_ROWS * self.in_features
        return self.multiply_quantized(x) if few else super().multiply(x)

    def pack_quantized(self, weight: Tensor, bias: Tensor | None) -> None:
        raise NotImplementedError

    def multiply_quantized(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class FbgemmInt8Linear(QuantizedLinear):
    """int8 weights with a scale per output; activations rounded to 8 bits with one scale per call."""

    def pack_quantized(self, weight: Tensor, bias: Tensor | None) -> None:
        scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127  # [O]
        zero_points = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():  # quantised tensors are deprecated, the kernel that takes them is not replaced
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
        self.packed_int8 = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.float())

    def multiply_quantized(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic(x, self.packed_int8)
        return product


class GroupedInt4Linear(QuantizedLinear):
    """int4 weights, with a scale and a zero per group of inputs."""

    def pack_quantized(self, weight: Tensor, bias: Tensor | None) -> None:
        fitting = [size for size in (128, 64, 32) if self.in_features % size == 0]
        if not fitting or self.out_features % 16:
            raise ModelLoadError(
                "int4 needs input sizes that are a multiple of 32 and output sizes that are a multiple of 16",
                layer=f"{self.in_features}x{self.out_features}",
            )
        self.group_size = fitting[0]
        grouped = weight.view(self.out_features, -1, self.group_size)
        smallest, largest = grouped.amin(dim=2), grouped.amax(dim=2)  # [O, groups]
        scales = ((largest - smallest) / 15).clamp(min=1e-8)
        levels = ((grouped - smallest[..., None]) / scales[..., None]).round().clamp(0, 15)
        self.packed_int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            levels.to(torch.int32).view(self.out_features, self.in_features), 1
        )
        # The kernel computes (level - 8) * scale + zero.
        self.scales_and_zeros = torch.stack([scales, smallest + 8 * scales], dim=2).transpose(0, 1).contiguous()
        self.bias = None if bias is None else bias.float()

    def multiply_quantized(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat, self.packed_int4, self.group_size, self.scales_and_zeros
        )
        product = product.view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


@dataclasses.dataclass(frozen=True)
class LinearKernel:
    """A kernel, the dtypes it works in, and the row counts worth trying for it.

    `reference_rows` are the counts whose bits may define "the" bits of a row, the most wanted first. `exact_between`:
    where the candidates are exact, so is every count between them.
    """

    name: str
    layer: type[RowLinear]
    weights_dtype: str
    compute_dtype: torch.dtype
    candidate_rows: tuple[int, ...]
    reference_rows: tuple[int, ...]
    exact_between: bool = False

    @property
    def max_rows(self) -> int:
        return self.candidate_rows[-1]


_INDEPENDENT_ROWS = (*range(1, 10), 12, 17, 32, 64, 192)
_CPU_ROWS = (*range(1, 17), 18, 20, 24, 30, 36, 42, 48)
_GPU_ROWS = (16, 32, 64, 128, 256)


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype of `auto`: bfloat16 where it is fast, else float16 weights under float32 sums."""
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float16 if _has_fused_multiply_add() else torch.float32


def choose_kernel(device: torch.device, dtype: torch.dtype, quantization: Quantization = "none") -> LinearKernel:
    """Raises ModelLoadError for a quantisation that the device has no kernel for."""
    if quantization != "none":
        if device.type != "cpu":
            raise ModelLoadError(f"quantization {quantization} is for CPUs; this model is on {device.type}")
        if "fbgemm" not in torch.backends.quantized.supported_engines or not _has_fused_multiply_add():
            raise ModelLoadError(f"quantization {quantization} needs an x86 processor with AVX2")
        layer = FbgemmInt8Linear if quantization == "int8" else GroupedInt4Linear
        name = "fbgemm-int8-dynamic" if quantization == "int8" else "int4-groups"
        return LinearKernel(name, layer, quantization, torch.float32, tuple(range(1, 513)), ())
    weights_dtype = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        rows = (*_CPU_ROWS, 64)
        return LinearKernel("onednn-bfloat16-packed", OnednnBfloat16Linear, "bfloat16", dtype, rows, (64, 48))
    if device.type == "cpu" and _has_fused_multiply_add():
        return LinearKernel(
            ROW_PRODUCT_KERNEL, IndependentRowsLinear, weights_dtype, torch.float32, _INDEPENDENT_ROWS, (8,), True
        )
    rows, references = (_CPU_ROWS, (48, 8, 1)) if device.type == "cpu" else (_GPU_ROWS, (64, 32, 16))
    return LinearKernel("torch-linear", PlainLinear, weights_dtype, dtype, rows, references)


def _has_fused_multiply_add() -> bool:
    """Also of the float16 conversions, which came to x86 with AVX2 at the latest; other processors have both."""
    return platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability() != "DEFAULT"
