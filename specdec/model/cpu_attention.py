"""Attention over the paged cache on a CPU: one kernel call per layer for all rows of all sessions.

A row's scores and weighted sum run over its keys in groups of eight neighbouring positions. One piece of code does a
group, wherever its keys lie: in a block or along a path of a tree; places of the group that are no key of the row's
point to one that is, and weigh nothing. So the bits depend on the row's position and contents alone, and nothing else
in the storage is ever read. Rows of one session that stand next to each other are done together, group by group, while
the keys are in the processor's cache. Threads share the work by such tiles of rows, and by heads.

Legend: M rows, Hq query heads, H key-value heads, G query heads per key-value head, D head size, T tiles.
"""

import itertools
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_name
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from specdec import openmp
from specdec.model.attention_plan import AttentionOptions, AttentionPlan
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.compiled_math import compiled, exp, put, tanh, widen
from specdec.model.kv_cache import KVStorage

CPU_ATTENTION_KERNEL = (
    f"paged-groups-of-8 v1, numba {numba.__version__}, llvmlite {llvmlite.__version__}, {get_host_cpu_name()}"
)
_GROUP = 8  # positions; divides the block size
_TILE_HEADS = 12  # rows x query heads that share the loads of a key
_ITEMS_PER_THREAD = 4

_ARGUMENTS = np.dtype(
    [
        ("query", np.uintp),
        ("query_row_stride", np.int64),
        ("query_head_stride", np.int64),
        ("new_key", np.uintp),
        ("new_key_row_stride", np.int64),
        ("new_key_head_stride", np.int64),
        ("new_value", np.uintp),
        ("new_value_row_stride", np.int64),
        ("new_value_head_stride", np.int64),
        ("output", np.uintp),
        ("keys", np.uintp),
        ("values", np.uintp),
        ("num_storage_rows", np.int64),
        ("num_keys", np.uintp),
        ("num_direct_keys", np.uintp),
        ("ancestor_slots", np.uintp),
        ("ancestor_width", np.int64),
        ("sessions", np.uintp),
        ("block_tables", np.uintp),
        ("table_width", np.int64),
        ("write_slots", np.uintp),
        ("tiles", np.uintp),
        ("num_tiles", np.int64),
        ("head_pieces", np.int64),
        ("scratch", np.uintp),
        ("scratch_bytes", np.int64),
        ("score_width", np.int64),
        ("num_rows", np.int64),
        ("num_heads", np.int64),
        ("num_kv_heads", np.int64),
        ("head_size", np.int64),
        ("sliding_window", np.int64),
        ("sinks", np.uintp),
        ("scaling", np.float32),
        ("softcap", np.float32),
    ],
    align=True,
)
_UNBOUNDED = 1 << 40  # length of a flat view whose end nobody asks for
_PLACES_BYTES = 8 * _GROUP


@compiled  # type: ignore[untyped-decorator]
def _find_group(
    places: Any, start: Any, num_keys: Any, num_direct: Any, table: Any, ancestors: Any, kv_heads: Any, head: Any
) -> None:
    """The storage rows of the keys [start, start + 8) of a head."""
    if start + _GROUP <= num_direct:
        first = (np.int64(table[start // BLOCK_SIZE]) * kv_heads + head) * BLOCK_SIZE + start % BLOCK_SIZE
        for i in range(_GROUP):
            places[i] = first + i
    else:
        for i in range(_GROUP):
            position = min(start + i, num_keys - 1)
            slot = position if position < num_direct else np.int64(ancestors[position - num_direct])
            places[i] = (np.int64(table[slot // BLOCK_SIZE]) * kv_heads + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@compiled  # type: ignore[untyped-decorator]
def _score_group(query: Any, keys: Any, places: Any, scores: Any, start: Any) -> None:
    k0, k1, k2, k3 = keys[places[0]], keys[places[1]], keys[places[2]], keys[places[3]]
    k4, k5, k6, k7 = keys[places[4]], keys[places[5]], keys[places[6]], keys[places[7]]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for d in range(query.shape[0]):
        x = query[d]
        s0 += x * widen(k0[d])
        s1 += x * widen(k1[d])
        s2 += x * widen(k2[d])
        s3 += x * widen(k3[d])
        s4 += x * widen(k4[d])
        s5 += x * widen(k5[d])
        s6 += x * widen(k6[d])
        s7 += x * widen(k7[d])
    scores[start], scores[start + 1], scores[start + 2], scores[start + 3] = s0, s1, s2, s3
    scores[start + 4], scores[start + 5], scores[start + 6], scores[start + 7] = s4, s5, s6, s7


@compiled  # type: ignore[untyped-decorator]
def _add_group(weights: Any, start: Any, values: Any, places: Any, total: Any) -> None:
    w0, w1, w2, w3 = weights[start], weights[start + 1], weights[start + 2], weights[start + 3]
    w4, w5, w6, w7 = weights[start + 4], weights[start + 5], weights[start + 6], weights[start + 7]
    v0, v1, v2, v3 = values[places[0]], values[places[1]], values[places[2]], values[places[3]]
    v4, v5, v6, v7 = values[places[4]], values[places[5]], values[places[6]], values[places[7]]
    for d in range(total.shape[0]):
        total[d] += (
            w0 * widen(v0[d])
            + w1 * widen(v1[d])
            + w2 * widen(v2[d])
            + w3 * widen(v3[d])
            + w4 * widen(v4[d])
            + w5 * widen(v5[d])
            + w6 * widen(v6[d])
            + w7 * widen(v7[d])
        )


@compiled  # type: ignore[untyped-decorator]
def _weigh(scores: Any, before: Any, end: Any, softcap: Any, sink: Any) -> Any:
    """Scores [before, end) to weights, zero elsewhere. Returns what to divide by. The length is a multiple of 8."""
    length = scores.shape[0]
    if softcap > 0:
        for i in range(length):
            scores[i] = softcap * tanh(scores[i] / softcap)
    for i in range(before):
        scores[i] = -np.inf
    for i in range(end, length):
        scores[i] = -np.inf
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = np.float32(-np.inf)
    for i in range(0, length, _GROUP):
        m0, m1, m2, m3 = max(m0, scores[i]), max(m1, scores[i + 1]), max(m2, scores[i + 2]), max(m3, scores[i + 3])
        m4, m5, m6, m7 = max(m4, scores[i + 4]), max(m5, scores[i + 5]), max(m6, scores[i + 6]), max(m7, scores[i + 7])
    highest = max(max(max(m0, m1), max(m2, m3)), max(max(m4, m5), max(m6, m7)), sink)
    for i in range(length):
        scores[i] = exp(scores[i] - highest)
    for i in range(before):
        scores[i] = np.float32(0)
    for i in range(end, length):
        scores[i] = np.float32(0)
    total = np.float32(0) if sink == -np.inf else exp(sink - highest)
    for i in range(length):
        total += scores[i]
    return total


@compiled  # type: ignore[untyped-decorator]
def _write_new(record: Any, source: Any, row_stride: Any, head_stride: Any, storage: Any) -> None:
    write_slots = carray(openmp.pointer(record.write_slots), (record.num_rows,), np.int64)
    for row in range(openmp.part_index(), record.num_rows, openmp.num_parts()):
        block, place = write_slots[row] // BLOCK_SIZE, write_slots[row] % BLOCK_SIZE
        if write_slots[row] >= 0:
            for head in range(record.num_kv_heads):
                target = storage[(block * record.num_kv_heads + head) * BLOCK_SIZE + place]
                first = row * row_stride + head * head_stride
                for d in range(record.head_size):
                    target[d] = source[first + d]


@compiled  # type: ignore[untyped-decorator]
def _attend_tile(
    record: Any, tile: Any, head: Any, first_of_group: Any, end_of_group: Any,
    query: Any, keys: Any, values: Any, output: Any,
) -> None:  # fmt: skip
    """Rows of one session, one key-value head, and of its query heads those in [first_of_group, end_of_group)."""
    size, kv_heads, num_rows = record.head_size, record.num_kv_heads, record.num_rows
    num_keys = carray(openmp.pointer(record.num_keys), (num_rows,), np.int32)
    num_direct = carray(openmp.pointer(record.num_direct_keys), (num_rows,), np.int32)
    ancestors = carray(openmp.pointer(record.ancestor_slots), (num_rows, record.ancestor_width), np.int32)
    sessions = carray(openmp.pointer(record.sessions), (num_rows,), np.int32)
    tables = carray(openmp.pointer(record.block_tables), (num_rows, record.table_width), np.int32)
    sinks = carray(openmp.pointer(record.sinks), (record.num_heads,), np.float32)
    tiles = carray(openmp.pointer(record.tiles), (record.num_tiles + 1,), np.int32)
    first_row, end_row = tiles[tile], tiles[tile + 1]
    first_head = head * (record.num_heads // kv_heads) + first_of_group
    num_heads = end_of_group - first_of_group
    num_items = (end_row - first_row) * num_heads  # item: a query head of a row

    scratch = record.scratch + np.uintp(openmp.part_index() * record.scratch_bytes)
    places = carray(openmp.pointer(scratch), (_GROUP,), np.int64)
    queries = carray(openmp.pointer(scratch + np.uintp(_PLACES_BYTES)), (num_items, size), np.float32)
    totals_at = scratch + np.uintp(_PLACES_BYTES + 4 * num_items * size)
    totals = carray(openmp.pointer(totals_at), (num_items, size), np.float32)
    scores_at = totals_at + np.uintp(4 * num_items * size)
    scores = carray(openmp.pointer(scores_at), (num_items, record.score_width), np.float32)

    table = tables[sessions[first_row]]
    lowest, highest = np.int64(num_keys[first_row]), np.int64(0)
    for row in range(first_row, end_row):
        lowest = min(lowest, _first_group(num_keys[row], record.sliding_window))
        highest = max(highest, np.int64(num_keys[row]))
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            at = row * record.query_row_stride + (first_head + i) * record.query_head_stride
            for d in range(size):
                queries[item, d] = widen(query[at + d]) * record.scaling
                totals[item, d] = np.float32(0)

    for start in range(lowest, highest, _GROUP):
        for row in range(first_row, end_row):
            first_group = _first_group(num_keys[row], record.sliding_window)
            if first_group <= start < num_keys[row]:
                _find_group(places, start, num_keys[row], num_direct[row], table, ancestors[row], kv_heads, head)
                for item in range((row - first_row) * num_heads, (row - first_row + 1) * num_heads):
                    _score_group(queries[item], keys, places, scores[item], start - first_group)

    for row in range(first_row, end_row):
        first_group = _first_group(num_keys[row], record.sliding_window)
        length = np.int64(num_keys[row]) - first_group
        before = max(np.int64(0), np.int64(num_keys[row]) - record.sliding_window) - first_group
        padded = (length + _GROUP - 1) // _GROUP * _GROUP
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            sink = sinks[first_head + i] if record.sinks else np.float32(-np.inf)
            divisor = _weigh(scores[item, :padded], before, length, record.softcap, sink)
            queries[item, 0] = divisor  # the query has been read

    for start in range(lowest, highest, _GROUP):
        for row in range(first_row, end_row):
            first_group = _first_group(num_keys[row], record.sliding_window)
            if first_group <= start < num_keys[row]:
                _find_group(places, start, num_keys[row], num_direct[row], table, ancestors[row], kv_heads, head)
                for item in range((row - first_row) * num_heads, (row - first_row + 1) * num_heads):
                    _add_group(scores[item], start - first_group, values, places, totals[item])

    for row in range(first_row, end_row):
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            at = (row * record.num_heads + first_head + i) * size
            factor = np.float32(1) / queries[item, 0]
            for d in range(size):
                put(output, at + d, totals[item, d] * factor if num_keys[row] else np.float32(0))


@compiled  # type: ignore[untyped-decorator]
def _first_group(num_keys: Any, sliding_window: Any) -> Any:
    """Where the first group starts that holds a key of the row's."""
    return max(np.int64(0), np.int64(num_keys) - sliding_window) // _GROUP * _GROUP


@compiled  # type: ignore[untyped-decorator]
def _write_and_attend(
    record: Any, query: Any, new_keys: Any, new_values: Any, keys: Any, values: Any, output: Any
) -> None:
    _write_new(record, new_keys, record.new_key_row_stride, record.new_key_head_stride, keys)
    _write_new(record, new_values, record.new_value_row_stride, record.new_value_head_stride, values)
    openmp.barrier()
    group_size = record.num_heads // record.num_kv_heads
    pieces = record.head_pieces
    for item in range(openmp.part_index(), record.num_tiles * record.num_kv_heads * pieces, openmp.num_parts()):
        piece, tile_and_head = item % pieces, item // pieces
        tile, head = tile_and_head // record.num_kv_heads, tile_and_head % record.num_kv_heads
        _attend_tile(
            record, tile, head, piece * group_size // pieces, (piece + 1) * group_size // pieces,
            query, keys, values, output,
        )  # fmt: skip


@openmp.kernel(_ARGUMENTS)
def _attend_float32(arguments: Any) -> None:
    record = carray(arguments, 1)[0]
    storage_shape = (record.num_storage_rows, record.head_size)
    _write_and_attend(
        record,
        carray(openmp.pointer(record.query), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.new_key), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.new_value), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.keys), storage_shape, np.float32),
        carray(openmp.pointer(record.values), storage_shape, np.float32),
        carray(openmp.pointer(record.output), (_UNBOUNDED,), np.float32),
    )


@openmp.kernel(_ARGUMENTS)
def _attend_bfloat16(arguments: Any) -> None:
    record = carray(arguments, 1)[0]
    storage_shape = (record.num_storage_rows, record.head_size)
    _write_and_attend(
        record,
        carray(openmp.pointer(record.query), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.new_key), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.new_value), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.keys), storage_shape, np.uint16),
        carray(openmp.pointer(record.values), storage_shape, np.uint16),
        carray(openmp.pointer(record.output), (_UNBOUNDED,), np.uint16),
    )


_KERNELS = {torch.float32: _attend_float32, torch.bfloat16: _attend_bfloat16}
_NO_WINDOW = 1 << 40


class CpuPagedAttention:
    """Attends over one storage, from one thread at a time. Its scratch is kept between calls and grows."""

    def __init__(self, storage: KVStorage) -> None:
        layout = storage.layout
        self._kernel = _KERNELS[layout.dtype]
        self._kv_heads = layout.num_kv_heads
        self._keys = [keys.data_ptr() for keys in storage.keys]
        self._values = [values.data_ptr() for values in storage.values]
        self._arguments = np.zeros(1, dtype=_ARGUMENTS)
        self._arguments["num_storage_rows"] = storage.keys[0].numel() // layout.head_size
        self._arguments["num_kv_heads"] = layout.num_kv_heads
        self._arguments["head_size"] = layout.head_size
        self._record = self._arguments[0]
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
        record = self._record
        for name, rows in (("query", query), ("new_key", key), ("new_value", value)):
            row_stride, head_stride, _ = rows.stride()
            record[name] = rows.data_ptr()
            record[f"{name}_row_stride"], record[f"{name}_head_stride"] = row_stride, head_stride
        record["keys"], record["values"] = self._keys[layer_index], self._values[layer_index]
        record["output"] = output.data_ptr()
        record["sliding_window"] = options.sliding_window or _NO_WINDOW
        record["scaling"], record["softcap"] = options.scaling, options.softcap or 0.0
        record["sinks"] = 0 if options.sinks is None else options.sinks.data_ptr()
        openmp.run(self._kernel, self._arguments)

    def _use(self, plan: AttentionPlan, num_heads: int) -> None:
        """Cuts the plan's rows into tiles and makes room for what threads keep of one."""
        record, threads = self._record, torch.get_num_threads()
        group_size = num_heads // self._kv_heads
        num_rows = len(plan.num_keys)
        tile_rows = max(1, min(_TILE_HEADS // group_size, num_rows * self._kv_heads // (_ITEMS_PER_THREAD * threads)))
        self._tiles = _cut(plan.first_rows, num_rows, tile_rows)
        num_items = (len(self._tiles) - 1) * self._kv_heads
        score_width = -(-int(plan.num_keys.max()) // _GROUP) * _GROUP + _GROUP
        head_size = int(record["head_size"])
        scratch_bytes = _PLACES_BYTES + 4 * tile_rows * group_size * (2 * head_size + score_width)
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
