"""The compiled kernel of attention over the paged cache: one call per layer for all rows of all sessions.

A row's scores and weighted sum run over its keys in groups of eight neighbouring positions. One piece of code does a
group, wherever its keys lie: in a block or along a path of a tree; places of the group that are no key of the row's
point to one that is, and weigh nothing. So the bits depend on the row's position and contents alone, and nothing else
in the storage is ever read. Rows of one session that stand next to each other are done together, group by group, while
the keys are in the processor's cache. Threads share the work by such tiles of rows, and by heads.

Legend: M rows, Hq query heads, H key-value heads, T tiles; an item is a query head of a row.
"""

import struct
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite.binding import get_host_cpu_name
from numba import carray

from specdec import openmp
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.simd import (
    LANES,
    add,
    compiled,
    divide,
    exp,
    lane,
    largest_lane,
    load,
    load_one,
    maximum,
    multiply,
    multiply_add,
    splat,
    store,
    store_one,
    subtract,
    sum_of_lanes,
    sums,
    tanh,
)

CPU_ATTENTION_KERNEL = (
    f"paged-groups-of-8 v2, numba {numba.__version__}, llvmlite {llvmlite.__version__}, {get_host_cpu_name()}"
)
_OF_A_LAYER = [
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
    ("sinks", np.uintp),
    ("sliding_window", np.int64),
    ("scaling", np.float32),
    ("softcap", np.float32),
]
PACK_LAYER = struct.Struct("14q2f")
"""Sets what changes from layer to layer in one call; every field set alone would take as long."""
_OF_A_FORWARD = [
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
]
ARGUMENTS = np.dtype([*_OF_A_LAYER, *_OF_A_FORWARD], align=True)
_UNBOUNDED = 1 << 40  # length of a flat view whose end nobody asks for
PLACES_BYTES = 8 * LANES


@compiled  # type: ignore[untyped-decorator]
def _find_group(
    places: Any, start: Any, num_keys: Any, num_direct: Any, table: Any, ancestors: Any, record: Any, head: Any
) -> None:
    """Where in the storage the keys [start, start + 8) of a head begin."""
    size, kv_heads = record.head_size, record.num_kv_heads
    if start + LANES <= num_direct:
        first = (np.int64(table[start // BLOCK_SIZE]) * kv_heads + head) * BLOCK_SIZE + start % BLOCK_SIZE
        for i in range(LANES):
            places[i] = (first + i) * size
    else:
        for i in range(LANES):
            position = min(start + i, num_keys - 1)
            slot = position if position < num_direct else np.int64(ancestors[position - num_direct])
            place = (np.int64(table[slot // BLOCK_SIZE]) * kv_heads + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            places[i] = place * size


@compiled  # type: ignore[untyped-decorator]
def _score_group(queries: Any, query_at: Any, keys: Any, places: Any, scores: Any, scores_at: Any, size: Any) -> None:
    p0, p1, p2, p3 = places[0], places[1], places[2], places[3]
    p4, p5, p6, p7 = places[4], places[5], places[6], places[7]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    whole = size // LANES * LANES
    for d in range(0, whole, LANES):
        x = load(queries, query_at + d)
        s0 = multiply_add(x, load(keys, p0 + d), s0)
        s1 = multiply_add(x, load(keys, p1 + d), s1)
        s2 = multiply_add(x, load(keys, p2 + d), s2)
        s3 = multiply_add(x, load(keys, p3 + d), s3)
        s4 = multiply_add(x, load(keys, p4 + d), s4)
        s5 = multiply_add(x, load(keys, p5 + d), s5)
        s6 = multiply_add(x, load(keys, p6 + d), s6)
        s7 = multiply_add(x, load(keys, p7 + d), s7)
    store(scores, scores_at, sums(s0, s1, s2, s3, s4, s5, s6, s7))
    for d in range(whole, size):
        for i in range(LANES):
            scores[scores_at + i] += queries[query_at + d] * load_one(keys, places[i] + d)


@compiled  # type: ignore[untyped-decorator]
def _add_group(weights: Any, weights_at: Any, values: Any, places: Any, totals: Any, total_at: Any, size: Any) -> None:
    p0, p1, p2, p3 = places[0], places[1], places[2], places[3]
    p4, p5, p6, p7 = places[4], places[5], places[6], places[7]
    w0, w1 = splat(weights[weights_at]), splat(weights[weights_at + 1])
    w2, w3 = splat(weights[weights_at + 2]), splat(weights[weights_at + 3])
    w4, w5 = splat(weights[weights_at + 4]), splat(weights[weights_at + 5])
    w6, w7 = splat(weights[weights_at + 6]), splat(weights[weights_at + 7])
    whole = size // LANES * LANES
    for d in range(0, whole, LANES):
        left = multiply_add(w0, load(values, p0 + d), load(totals, total_at + d))
        right = multiply(w1, load(values, p1 + d))
        left = multiply_add(w2, load(values, p2 + d), left)
        right = multiply_add(w3, load(values, p3 + d), right)
        left = multiply_add(w4, load(values, p4 + d), left)
        right = multiply_add(w5, load(values, p5 + d), right)
        left = multiply_add(w6, load(values, p6 + d), left)
        right = multiply_add(w7, load(values, p7 + d), right)
        store(totals, total_at + d, add(left, right))
    for d in range(whole, size):
        for i in range(LANES):
            totals[total_at + d] += weights[weights_at + i] * load_one(values, places[i] + d)


@compiled  # type: ignore[untyped-decorator]
def _weigh(scores: Any, at: Any, before: Any, end: Any, padded: Any, softcap: Any, sink: Any) -> Any:
    """Scores [before, end) to weights, zero elsewhere up to `padded`. Returns what the weighted sum is to divide by."""
    if softcap > 0:
        for i in range(0, padded, LANES):
            capped = tanh(divide(load(scores, at + i), splat(softcap)))
            store(scores, at + i, multiply(capped, splat(softcap)))
    for i in range(before):
        scores[at + i] = -np.inf
    for i in range(end, padded):
        scores[at + i] = -np.inf
    highest = splat(np.float32(-np.inf))
    for i in range(0, padded, LANES):
        highest = maximum(highest, load(scores, at + i))
    top = max(largest_lane(highest), sink)
    for i in range(0, padded, LANES):
        store(scores, at + i, exp(subtract(load(scores, at + i), splat(top))))
    for i in range(before):
        scores[at + i] = 0
    for i in range(end, padded):
        scores[at + i] = 0
    total = splat(np.float32(0))
    for i in range(0, padded, LANES):
        total = add(total, load(scores, at + i))
    divisor = sum_of_lanes(total)
    return divisor if sink == -np.inf else divisor + lane(exp(splat(sink - top)), 0)


@compiled  # type: ignore[untyped-decorator]
def _write_new(record: Any, source: Any, row_stride: Any, head_stride: Any, storage: Any) -> None:
    size, kv_heads = record.head_size, record.num_kv_heads
    write_slots = carray(openmp.pointer(record.write_slots), (record.num_rows,), np.int64)
    for row in range(openmp.part_index(), record.num_rows, openmp.num_parts()):
        if write_slots[row] >= 0:
            block, place = write_slots[row] // BLOCK_SIZE, write_slots[row] % BLOCK_SIZE
            for head in range(kv_heads):
                target = ((block * kv_heads + head) * BLOCK_SIZE + place) * size
                first = row * row_stride + head * head_stride
                for d in range(size):
                    storage[target + d] = source[first + d]


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
    places = carray(openmp.pointer(scratch), (LANES,), np.int64)
    queries = carray(openmp.pointer(scratch + np.uintp(PLACES_BYTES)), (num_items * size,), np.float32)
    totals_at = scratch + np.uintp(PLACES_BYTES + 4 * num_items * size)
    totals = carray(openmp.pointer(totals_at), (num_items * size,), np.float32)
    divisors_at = totals_at + np.uintp(4 * num_items * size)
    divisors = carray(openmp.pointer(divisors_at), (num_items,), np.float32)
    width = record.score_width
    scores = carray(openmp.pointer(divisors_at + np.uintp(4 * num_items)), (num_items * width,), np.float32)

    table = tables[sessions[first_row]]
    lowest, highest = np.int64(num_keys[first_row]), np.int64(0)
    for row in range(first_row, end_row):
        lowest = min(lowest, _first_group(num_keys[row], record.sliding_window))
        highest = max(highest, np.int64(num_keys[row]))
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            at = row * record.query_row_stride + (first_head + i) * record.query_head_stride
            for d in range(size):
                queries[item * size + d] = load_one(query, at + d) * record.scaling
                totals[item * size + d] = 0

    for start in range(lowest, highest, LANES):
        for row in range(first_row, end_row):
            first_group = _first_group(num_keys[row], record.sliding_window)
            if first_group <= start < num_keys[row]:
                _find_group(places, start, num_keys[row], num_direct[row], table, ancestors[row], record, head)
                for item in range((row - first_row) * num_heads, (row - first_row + 1) * num_heads):
                    scores_at = item * width + start - first_group
                    _score_group(queries, item * size, keys, places, scores, scores_at, size)

    for row in range(first_row, end_row):
        first_group = _first_group(num_keys[row], record.sliding_window)
        length = np.int64(num_keys[row]) - first_group
        before = max(np.int64(0), np.int64(num_keys[row]) - record.sliding_window) - first_group
        padded = (length + LANES - 1) // LANES * LANES
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            sink = sinks[first_head + i] if record.sinks else np.float32(-np.inf)
            divisors[item] = _weigh(scores, item * width, before, length, padded, record.softcap, sink)

    for start in range(lowest, highest, LANES):
        for row in range(first_row, end_row):
            first_group = _first_group(num_keys[row], record.sliding_window)
            if first_group <= start < num_keys[row]:
                _find_group(places, start, num_keys[row], num_direct[row], table, ancestors[row], record, head)
                for item in range((row - first_row) * num_heads, (row - first_row + 1) * num_heads):
                    weights_at = item * width + start - first_group
                    _add_group(scores, weights_at, values, places, totals, item * size, size)

    for row in range(first_row, end_row):
        for i in range(num_heads):
            item = (row - first_row) * num_heads + i
            at = (row * record.num_heads + first_head + i) * size
            for d in range(size):
                total = totals[item * size + d] / divisors[item] if num_keys[row] else np.float32(0)
                store_one(output, at + d, total)


@compiled  # type: ignore[untyped-decorator]
def _first_group(num_keys: Any, sliding_window: Any) -> Any:
    """Where the first group starts that holds a key of the row's."""
    return max(np.int64(0), np.int64(num_keys) - sliding_window) // LANES * LANES


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


@openmp.kernel(ARGUMENTS)
def attend_float32(arguments: Any) -> None:
    record = carray(arguments, 1)[0]
    _write_and_attend(
        record,
        carray(openmp.pointer(record.query), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.new_key), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.new_value), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.keys), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.values), (_UNBOUNDED,), np.float32),
        carray(openmp.pointer(record.output), (_UNBOUNDED,), np.float32),
    )


@openmp.kernel(ARGUMENTS)
def attend_bfloat16(arguments: Any) -> None:
    record = carray(arguments, 1)[0]
    _write_and_attend(
        record,
        carray(openmp.pointer(record.query), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.new_key), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.new_value), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.keys), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.values), (_UNBOUNDED,), np.uint16),
        carray(openmp.pointer(record.output), (_UNBOUNDED,), np.uint16),
    )
