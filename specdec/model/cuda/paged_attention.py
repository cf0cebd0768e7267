"""Attention over the paged cache on a CUDA device.

Launches the kernels and owns what they read beside the cache: the arrays of the forward, at fixed addresses, and room
for the splits' results. Lengths and tables are read on the device, so a recorded forward serves every batch of its
shape.

Legend: M rows, Hq query heads, H key/value heads, D head size, S splits of the context.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from specdec.model.attention_plan import NO_SLOT, AttentionOptions, AttentionPlan
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.cuda import attention_kernels as kernels
from specdec.model.cuda.step_inputs import RowArrays, StepInputs
from specdec.model.kv_cache import KVStorage

CUDA_ATTENTION_KERNEL = f"triton-paged v1, triton {triton.__version__}"

_MOST_SPLITS = 32
_SMALLEST_SPLIT = 256
_SMALLEST_PRODUCT = 16  # rows and columns of a tensor core's product
_ENOUGH_PROGRAMS = 1024  # to fill the largest devices; with more, each has less to do for the same work around it
_LARGE_HEAD = 128  # beyond, a tile is half as long: it has to fit the shared memory of small devices


class CudaPagedAttention:
    """Reads the arrays of the plan that was begun last; `attend` begins another one itself where it is given one."""

    def __init__(self, storage: KVStorage, max_rows: int) -> None:
        layout = storage.layout
        self._storage, self._max_rows = storage, max_rows
        self._inputs = StepInputs(max_rows, _most_indices(max_rows, layout.context_limit), layout.device)
        self._split = split_size(layout.context_limit)
        self._num_splits = -(-layout.context_limit // self._split)
        self._partials: tuple[Tensor, Tensor, Tensor] | None = None
        self.plan = idle_plan(1)
        self.rows: RowArrays = self._inputs.views(1)

    def begin(self, plan: AttentionPlan, token_ids: Sequence[int] = (), wanted_rows: Sequence[int] = ()) -> None:
        """Copies a forward's integers to the device, to addresses that follow from the number of rows alone."""
        num_rows, ancestors = len(plan.num_keys), plan.ancestor_slots
        has_trees = ancestors.size > 0
        arrays = {
            "token_ids": np.asarray(token_ids, dtype=np.int64),
            "positions": plan.positions,
            "wanted_rows": np.asarray(wanted_rows, dtype=np.int64),
            "write_slots": plan.write_slots,
            "num_keys": plan.num_keys,
            "num_direct_keys": plan.num_direct_keys,
            "table_starts": plan.sessions * plan.block_tables.shape[1],
            "ancestor_starts": plan.block_tables.size + np.arange(num_rows if has_trees else 0) * ancestors.shape[1],
        }
        indices = plan.block_tables.ravel()
        if has_trees:
            indices = np.concatenate([indices, ancestors.ravel()])
        self.plan, self.rows = plan, self._inputs.fill(num_rows, arrays, indices)

    def attend(
        self,
        layer_index: int,
        query: Tensor,  # [M, Hq, D]
        key: Tensor,  # [M, H, D]
        value: Tensor,  # [M, H, D]
        output: Tensor,  # [M, Hq, D]
        plan: AttentionPlan,
        options: AttentionOptions,
    ) -> None:
        """See `specdec.model.paged_attention.PagedAttention`."""
        if plan is not self.plan:
            self.begin(plan)
        rows, layout = self.rows, self._storage.layout
        keys, values = self._storage.keys[layer_index], self._storage.values[layer_index]
        num_rows, num_heads, head_size = query.shape
        outputs, maxima, sums = self._room_for_partials(num_heads)
        kv_heads = layout.num_kv_heads
        group = num_heads // kv_heads
        window = options.sliding_window or 0
        sizes = {"D": head_size, "PADDED_D": _padded(head_size)}
        splits = {"S": self._num_splits, "SPLIT": self._split}
        kernels.write_rows[num_rows, kv_heads](
            key,
            value,
            keys,
            values,
            rows.write_slots,
            *key.stride()[:2],
            *value.stride()[:2],
            H=kv_heads,
            BLOCK=BLOCK_SIZE,
            num_warps=1,
            **sizes,
        )
        kernels.attend_splits[num_rows, kv_heads, programs_per_row(num_rows * kv_heads, self._num_splits)](
            query,
            keys,
            values,
            rows.num_keys,
            rows.num_direct_keys,
            rows.indices,
            rows.table_starts,
            rows.ancestor_starts,
            outputs,
            maxima,
            sums,
            *query.stride()[:2],
            SCALE=options.scaling,
            SOFTCAP=options.softcap or 0.0,
            WINDOW=window,
            H=kv_heads,
            G=group,
            PADDED_G=_padded(group),
            TILE=kernels.TILE if head_size <= _LARGE_HEAD else kernels.TILE // 2,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
            num_stages=2,
            **sizes,
            **splits,
        )
        kernels.combine_splits[num_rows, num_heads](
            rows.num_keys,
            outputs,
            maxima,
            sums,
            sums if options.sinks is None else options.sinks,
            output,
            *output.stride()[:2],
            HAS_SINKS=options.sinks is not None,
            WINDOW=window,
            NUM_HEADS=num_heads,
            num_warps=1,
            **sizes,
            **splits,
        )

    def _room_for_partials(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [M, Hq, S, D], maxima and sums [M, Hq, S] of the splits, for as many rows as a forward may have."""
        if self._partials is None or self._partials[0].shape[1] < num_heads:
            shape, layout = (self._max_rows, num_heads, self._num_splits), self._storage.layout
            sizes = ((*shape, layout.head_size), shape, shape)
            outputs, maxima, sums = (torch.empty(size, dtype=torch.float32, device=layout.device) for size in sizes)
            self._partials = outputs, maxima, sums
        return self._partials


def idle_plan(num_rows: int) -> AttentionPlan:
    """Of padding alone: reads and writes no key."""
    zeros = np.zeros(num_rows, dtype=np.int32)
    none = np.zeros((0, 0), dtype=np.int32)
    return AttentionPlan(
        positions=zeros.astype(np.int64),
        num_keys=zeros,
        num_direct_keys=zeros,
        ancestor_slots=np.zeros((num_rows, 0), dtype=np.int32),
        sessions=zeros,
        block_tables=none,
        write_slots=np.full(num_rows, NO_SLOT, dtype=np.int64),
        first_rows=np.zeros(1, dtype=np.int32),
    )


def split_size(context_limit: int) -> int:
    """Positions of a split. Follows from the model alone, so that a position's sums are the same in every batch."""
    share = -(-context_limit // _MOST_SPLITS)
    return max(_SMALLEST_SPLIT, -(-share // kernels.TILE) * kernels.TILE)


def programs_per_row(num_row_heads: int, num_splits: int) -> int:
    """Among how many programs the splits of a row and head are dealt. A matter of speed: each split stays as it is."""
    return max(1, min(num_splits, _ENOUGH_PROGRAMS // num_row_heads))


def _padded(size: int) -> int:
    return max(_SMALLEST_PRODUCT, 1 << (size - 1).bit_length())


def _most_indices(max_rows: int, context_limit: int) -> int:
    """A block table for each row, and as many ancestors as there may be rows."""
    return max_rows * (-(-context_limit // BLOCK_SIZE)) + max_rows * max_rows
