"""Triton kernels: write new keys and values into their slots, and attend to a paged cache, one row at a time.

What a row's bits depend on is its position alone:
- a program computes one row and one key/value head; rows never share a tile of scores, heads of a group do;
- keys are taken in tiles of `TILE` and in splits of `SPLIT` positions, both fixed. A row's splits are reduced apart
  and combined in order, however many programs share them: that number follows the size of the batch, the sums don't;
- nothing is tuned at run time, and no argument that follows the batch is specialised on, so all batches run the same
  machine code.
A slot that is not a row's own key is never read, so whatever lies there is harmless.

Legend: M rows, H key/value heads, G query heads per key/value head, D head size, S splits of the context.
"""

# Triton reads the names and types of kernels' arguments in its own way.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

BLOCK = 16  # positions of a cache block
TILE = 64  # keys that one step of a program takes

_STRIDES = {
    f"{name}_{dimension}_stride" for name in ("query", "key", "value", "output") for dimension in ("row", "head")
}
_INTEGER_ARRAYS = {"write_slots", "num_keys", "num_direct_keys", "indices", "table_starts", "ancestor_starts"}


def _kernel(function: Callable[..., None]) -> Any:
    """Compiles without looking at strides, or at the alignment of integers: both follow the number of rows."""
    names = inspect.signature(function).parameters.keys()
    return triton.jit(
        function,
        do_not_specialize=sorted(names & _STRIDES),
        do_not_specialize_on_alignment=sorted(names & _INTEGER_ARRAYS),
    )


@_kernel
def write_rows(
    key,  # [M, H, D]
    value,  # [M, H, D]
    keys,  # [blocks, H, BLOCK, D]
    values,
    write_slots,  # [M] int32: block * BLOCK + place, negative for a row that pads the batch
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(write_slots + row).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, PADDED_D)
        target = ((slot // BLOCK * H + head) * BLOCK + slot % BLOCK) * D + d
        new_key = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask=d < D)
        new_value = tl.load(value + row * value_row_stride + head * value_head_stride + d, mask=d < D)
        tl.store(keys + target, new_key.to(keys.dtype.element_ty), mask=d < D)
        tl.store(values + target, new_value.to(values.dtype.element_ty), mask=d < D)


@_kernel
def attend_splits(
    query,  # [M, H * G, D]
    keys,  # [blocks, H, BLOCK, D]
    values,
    num_keys,  # [M] int32, 0: a row that pads the batch
    num_direct_keys,  # [M] int32: so many of them lie in the cache's slots of their own number
    indices,  # int32: block tables, and the slots of the other keys, which are the ancestors of a tree's row
    table_starts,  # [M] int32: where the table of the row's session begins
    ancestor_starts,  # [M] int32: where the slots of the row's ancestors begin
    partial_outputs,  # [M, H * G, S, D] float32
    partial_maxima,  # [M, H * G, S] float32
    partial_sums,  # [M, H * G, S] float32
    query_row_stride,
    query_head_stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    WINDOW: tl.constexpr,  # 0: all keys
    H: tl.constexpr,
    G: tl.constexpr,
    PADDED_G: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    S: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(num_keys + row)
    start = tl.maximum(end - WINDOW, 0) if WINDOW else end * 0
    num_direct = tl.load(num_direct_keys + row)
    table = indices + tl.load(table_starts + row)
    ancestors = indices + tl.load(ancestor_starts + row)
    g, d = tl.arange(0, PADDED_G), tl.arange(0, PADDED_D)
    query_heads = head * G + g
    in_group = (g < G)[:, None] & (d < D)[None, :]
    queries = tl.load(
        query + row * query_row_stride + query_heads[:, None] * query_head_stride + d[None, :], mask=in_group, other=0.0
    ).to(keys.dtype.element_ty)
    for split in range(start // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        first = tl.maximum(split * SPLIT, start // TILE * TILE)
        last = tl.minimum(split * SPLIT + SPLIT, end)
        maxima = tl.full([PADDED_G], float("-inf"), tl.float32)
        sums = tl.zeros([PADDED_G], tl.float32)
        outputs = tl.zeros([PADDED_G, PADDED_D], tl.float32)
        for tile in range(first, last, TILE):
            j = tile + tl.arange(0, TILE)
            own = (j >= start) & (j < last)
            branch = tl.load(ancestors + (j - num_direct), mask=own & (j >= num_direct), other=0)
            slots = tl.where(j < num_direct, j, branch)
            blocks = tl.load(table + slots // BLOCK, mask=own, other=0).to(tl.int64)
            offsets = (((blocks * H + head) * BLOCK + slots % BLOCK) * D)[:, None] + d[None, :]
            wanted = own[:, None] & (d < D)[None, :]
            tile_keys = tl.load(keys + offsets, mask=wanted, other=0.0)  # [TILE, D]
            scores = tl.dot(queries, tl.trans(tile_keys), input_precision="ieee") * SCALE  # [G, TILE]
            if SOFTCAP > 0:
                scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * scores / SOFTCAP) + 1.0))  # tanh
            scores = tl.where(own[None, :], scores, float("-inf"))
            new_maxima = tl.maximum(maxima, tl.max(scores, 1))
            weights = tl.exp(scores - new_maxima[:, None])
            shrink = tl.exp(maxima - new_maxima)
            tile_values = tl.load(values + offsets, mask=wanted, other=0.0)  # [TILE, D]
            sums = sums * shrink + tl.sum(weights, 1)
            outputs = outputs * shrink[:, None] + tl.dot(
                weights.to(tile_values.dtype), tile_values, input_precision="ieee"
            )
            maxima = new_maxima
        target = (row * (H * G) + query_heads) * S + split
        tl.store(partial_maxima + target, maxima, mask=g < G)
        tl.store(partial_sums + target, sums, mask=g < G)
        tl.store(partial_outputs + target[:, None] * D + d[None, :], outputs, mask=in_group)


@_kernel
def combine_splits(
    num_keys,  # [M] int32
    partial_outputs,  # [M, H * G, S, D] float32
    partial_maxima,  # [M, H * G, S] float32
    partial_sums,  # [M, H * G, S] float32
    sinks,  # [H * G]: a score per head that takes weight and gives no value
    output,  # [M, H * G, D]
    output_row_stride,
    output_head_stride,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    S: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(num_keys + row)
    start = tl.maximum(end - WINDOW, 0) if WINDOW else end * 0
    d = tl.arange(0, PADDED_D)
    weight = 0.0
    total = tl.zeros([PADDED_D], tl.float32)
    partials = (row * NUM_HEADS + head) * S
    if end > 0:
        first = partials + start // SPLIT
        maximum = tl.load(partial_maxima + first)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            maximum = tl.maximum(maximum, sink)
        for split in range(start // SPLIT + 1, tl.cdiv(end, SPLIT)):
            maximum = tl.maximum(maximum, tl.load(partial_maxima + partials + split))
        if HAS_SINKS:
            weight += tl.exp(sink - maximum)
        for split in range(start // SPLIT, tl.cdiv(end, SPLIT)):
            share = tl.exp(tl.load(partial_maxima + partials + split) - maximum)
            weight += share * tl.load(partial_sums + partials + split)
            total += share * tl.load(partial_outputs + (partials + split) * D + d, mask=d < D, other=0.0)
        total = total / weight
    tl.store(
        output + row * output_row_stride + head * output_head_stride + d, total.to(output.dtype.element_ty), mask=d < D
    )
