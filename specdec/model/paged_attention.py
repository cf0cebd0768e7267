"""What a device's attention over the paged cache must do, and which implementation a device gets.

Knows the contract; refuses to know transformers. What every implementation owes: a row's result depends on its query,
its keys and values in the order of their positions, and the options; never on the rows beside it.

Legend: M rows, Hq query heads, H key-value heads, D head size.
"""

import importlib.util
from typing import Literal, Protocol

import torch
from torch import Tensor

from specdec.errors import ModelLoadError
from specdec.model.attention_plan import AttentionOptions, AttentionPlan
from specdec.model.cpu_attention import CpuPagedAttention
from specdec.model.cpu_attention_kernel import CPU_ATTENTION_KERNEL
from specdec.model.kv_cache import KVStorage


class PagedAttention(Protocol):
    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        plan: AttentionPlan,
        options: AttentionOptions,
    ) -> None:
        """Writes key and value [M, H, D] to the layer's slots, then attends for query [M, Hq, D] into output.

        All are of the storage's dtype; inputs may have any strides but the last, output is contiguous. Padding rows get
        zeros.
        """


def paged_attention(storage: KVStorage, max_rows: int) -> PagedAttention:
    """For forwards of up to `max_rows` rows. Raises ModelLoadError for a device that has none."""
    if _kernels_of(storage.layout.device) == "cpu":
        return CpuPagedAttention(storage)
    from specdec.model.cuda.paged_attention import CudaPagedAttention

    return CudaPagedAttention(storage, max_rows)


def attention_kernel_name(device: torch.device) -> str:
    """Name and version of the kernel, with what compiled it: equal names on equal processors mean equal bits."""
    if _kernels_of(device) == "cpu":
        return CPU_ATTENTION_KERNEL
    from specdec.model.cuda.paged_attention import CUDA_ATTENTION_KERNEL

    return CUDA_ATTENTION_KERNEL


def _kernels_of(device: torch.device) -> Literal["cpu", "cuda"]:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ModelLoadError(f"there is no attention kernel for devices of type {device.type}")
    if importlib.util.find_spec("triton") is None:
        raise ModelLoadError("attention on a CUDA device needs Triton, which comes with CUDA builds of torch")
    return "cuda"
