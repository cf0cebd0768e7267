"""What a device's attention over the paged cache must do, and which implementation a device gets.

Knows the contract; refuses to know transformers. What every implementation owes: a row's result depends on its query,
its keys and values in the order of their positions, and the options; never on the rows beside it.

Legend: M rows, Hq query heads, H key-value heads, D head size.
"""

from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import ModelLoadError
from specdec.model.attention_plan import AttentionOptions, AttentionPlan
from specdec.model.cpu_attention import CPU_ATTENTION_KERNEL, CpuPagedAttention
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

        All are of the storage's dtype; any strides but the last. Padding rows get zeros.
        """


def paged_attention(storage: KVStorage) -> PagedAttention:
    """Raises ModelLoadError for a device that has none."""
    _refuse_unknown_device(storage.layout.device)
    return CpuPagedAttention(storage)


def attention_kernel_name(device: torch.device) -> str:
    """Name and version of the kernel, with what compiled it: equal names on equal processors mean equal bits."""
    _refuse_unknown_device(device)
    return CPU_ATTENTION_KERNEL


def _refuse_unknown_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise ModelLoadError(f"there is no attention kernel for devices of type {device.type}")
