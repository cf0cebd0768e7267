"""Joins the models of transformers to the paged cache: the attention function that their modelling code calls.

Registered with `transformers.AttentionInterface`, so modelling code stays as it is; without a mask function of that
name, transformers builds no mask of its own. Knows shapes and options as transformers passes them; refuses to know how
keys are found and summed.

Legend: M rows of the forward, Hq query heads, H key-value heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.errors import ModelLoadError
from specdec.model.attention_plan import AttentionOptions, AttentionPlan
from specdec.model.kv_cache import CacheLayout
from specdec.model.paged_attention import PagedAttention

ATTENTION_NAME = "specdec"


class OutputBuffer:
    """What attention gives, reused over layers and forwards: it is consumed before the next layer attends.

    The layout that it follows is the cache's.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._output = torch.empty(0, dtype=layout.dtype, device=layout.device)

    def refuse_other_shapes(self, key: Tensor, value: Tensor) -> None:
        """Raises ModelLoadError for a layer whose heads are not the cache's: the kernel would write elsewhere."""
        layout = self._layout
        wanted = (1, layout.num_kv_heads, layout.head_size)
        for states in (key, value):
            if (states.shape[0], states.shape[1], states.shape[3]) != wanted:
                raise ModelLoadError(
                    f"a layer with {states.shape[1]} key-value heads of size {states.shape[3]} is not supported "
                    f"in a model whose layers have {layout.num_kv_heads} of size {layout.head_size}"
                )

    def rows(self, num_rows: int, num_heads: int) -> Tensor:
        """[M, Hq, D], of any content."""
        num_elements = num_rows * num_heads * self._layout.head_size
        if num_elements > self._output.numel():
            self._output = torch.empty(2 * num_elements, dtype=self._layout.dtype, device=self._layout.device)
        return self._output[:num_elements].view(num_rows, num_heads, -1)


class AttentionBatch:
    """What attention needs in every layer of one forward. Notes the layers that ran and the windows they had."""

    def __init__(self, implementation: PagedAttention, plan: AttentionPlan, outputs: OutputBuffer) -> None:
        self.implementation, self.plan, self.outputs = implementation, plan, outputs
        self.layers_run: list[int] = []
        self.windows: list[int | None] = []


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specdec_batch: AttentionBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Writes keys and values [1, H, M, D] to the sessions' blocks and attends for query [1, Hq, M, D].

    Returns [1, M, Hq, D]. Which keys a row sees is the batch's own; `attention_mask` is not read.
    """
    layer_index: int = module.layer_idx  # type: ignore[assignment]  # nn.Module: tensor or module
    specdec_batch.layers_run.append(layer_index)
    specdec_batch.windows.append(sliding_window)
    if options.get("position_bias") is not None:
        raise ModelLoadError("attention with a position bias is not supported")
    num_heads, num_rows, head_size = query.shape[1:]
    specdec_batch.outputs.refuse_other_shapes(key, value)
    output = specdec_batch.outputs.rows(num_rows, num_heads)  # [M, Hq, D]
    specdec_batch.implementation.attend(
        layer_index,
        _rows_first(query, output.dtype),
        _rows_first(key, output.dtype),
        _rows_first(value, output.dtype),
        output,
        specdec_batch.plan,
        AttentionOptions(
            scaling=head_size**-0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.float().contiguous(),
        ),
    )
    return output[None].to(query.dtype), None


def _rows_first(states: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, M, D] to [M, heads, D], without a copy wherever the last dimension is dense already."""
    rows = states[0].transpose(0, 1).to(dtype)
    return rows if rows.stride(2) == 1 else rows.contiguous()


AttentionInterface.register(ATTENTION_NAME, attend)
