"""Attention over the paged cache on a CPU: hands one forward's plan and each layer's tensors to the compiled kernel.

Knows how work is cut for threads, which changes no bit; refuses to know how a key is scored.

Legend: M rows, Hq query heads, H key-value heads, G query heads per key-value head, D head size, T tiles.
"""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import openmp
from specdec.model.attention_plan import AttentionOptions, AttentionPlan
from specdec.model.cpu_attention_kernel import (
    ARGUMENTS,
    PACK_LAYER,
    PLACES_BYTES,
    attend_bfloat16,
    attend_float32,
)
from specdec.model.kv_cache import KVStorage
from specdec.model.simd import LANES

_TILE_HEADS = 12  # rows x query heads that share the loads of a key
_ITEMS_PER_THREAD = 4
_KERNELS = {torch.float32: attend_float32, torch.bfloat16: attend_bfloat16}
_NO_WINDOW = 1 << 40


class CpuPagedAttention:
    """Attends over one storage, from one thread at a time. Its scratch is kept between calls and grows."""

    def __init__(self, storage: KVStorage) -> None:
        layout = storage.layout
        self._kernel = _KERNELS[layout.dtype]
        self._kv_heads = layout.num_kv_heads
        self._keys = [keys.data_ptr() for keys in storage.keys]
        self._values = [values.data_ptr() for values in storage.values]
        self._arguments = np.zeros(1, dtype=ARGUMENTS)
        self._arguments["num_kv_heads"] = layout.num_kv_heads
        self._arguments["head_size"] = layout.head_size
        self._record = self._arguments[0]
        self._argument_bytes = self._arguments.view(np.uint8).data
        self._storage = storage  # what the addresses point to
        self._scratch = np.empty(0, dtype=np.uint8)
        self._plan: AttentionPlan | None = None
        self._tiles = np.zeros(1, dtype=np.int32)

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
        if plan is not self._plan:
            self._use(plan, query.shape[1])
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        PACK_LAYER.pack_into(
            self._argument_bytes,
            0,
            query.data_ptr(),
            query_strides[0],
            query_strides[1],
            key.data_ptr(),
            key_strides[0],
            key_strides[1],
            value.data_ptr(),
            value_strides[0],
            value_strides[1],
            output.data_ptr(),
            self._keys[layer_index],
            self._values[layer_index],
            0 if options.sinks is None else options.sinks.data_ptr(),
            options.sliding_window or _NO_WINDOW,
            options.scaling,
            options.softcap or 0.0,
        )
        openmp.run(self._kernel, self._arguments)

    def _use(self, plan: AttentionPlan, num_heads: int) -> None:
        """Cuts the plan's rows into tiles and makes room for what threads keep of one."""
        record, threads = self._record, torch.get_num_threads()
        group_size = num_heads // self._kv_heads
        num_rows = len(plan.num_keys)
        tile_rows = max(1, min(_TILE_HEADS // group_size, num_rows * self._kv_heads // (_ITEMS_PER_THREAD * threads)))
        self._tiles = _cut(plan.first_rows, num_rows, tile_rows)
        num_items = (len(self._tiles) - 1) * self._kv_heads
        score_width = -(-int(plan.num_keys.max()) // LANES) * LANES + LANES
        head_size = int(record["head_size"])
        scratch_bytes = PLACES_BYTES + 4 * tile_rows * group_size * (2 * head_size + 1 + score_width)
        scratch_bytes = -(-scratch_bytes // 64) * 64
        if len(self._scratch) < threads * scratch_bytes:
            self._scratch = np.empty(2 * threads * scratch_bytes, dtype=np.uint8)
        record["num_rows"], record["num_heads"], record["num_tiles"] = num_rows, num_heads, len(self._tiles) - 1
        record["head_pieces"] = group_size if num_items < 2 * threads else 1
        record["scratch"], record["scratch_bytes"] = self._scratch.ctypes.data, scratch_bytes
        record["score_width"] = score_width
        record["ancestor_width"], record["table_width"] = plan.ancestor_slots.shape[1], plan.block_tables.shape[1]
        for name in ("num_keys", "num_direct_keys", "ancestor_slots", "sessions", "block_tables", "write_slots"):
            record[name] = getattr(plan, name).ctypes.data
        record["tiles"] = self._tiles.ctypes.data
        self._plan = plan  # what the addresses point to


def _cut(first_rows: NDArray[np.int32], num_rows: int, tile_rows: int) -> NDArray[np.int32]:
    """[T + 1] borders: at most `tile_rows` rows each, and no tile of two sessions; padding rows are tiles too."""
    if tile_rows == 1:
        return np.arange(num_rows + 1, dtype=np.int32)
    borders = [*first_rows.tolist(), num_rows]
    pieces = [range(start, end, tile_rows) for start, end in itertools.pairwise(borders)]
    return np.array([*itertools.chain(*pieces), num_rows], dtype=np.int32)
