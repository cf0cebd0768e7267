"""Attention over many sessions in one forward, with the same bits for a row however it came to run.

Registered with `transformers.AttentionInterface`, so modelling code stays as it is; without a mask function of that
name, transformers builds no mask of its own. What keeps the bits:
- every row is a batch entry of its own, its grouped heads the query block, so that no shape depends on the batch;
- query blocks are padded to a multiple of four heads;
- keys are padded under a mask to a multiple of 64 slots that the row's own position decides: rows of one session that
  reach into different multiples attend apart, since beyond 256 keys the number of masked ones changes bits too;
- a tree row reads its ancestors' keys in the order a chain would have them. A path of the tree is written right after
  the committed keys, its rows attend, and the next path follows: no committed key is ever copied.

Legend: M rows of the forward, R rows of one session, H key-value heads, G query heads per key-value head, D head size,
L keys under the mask.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.errors import ModelLoadError
from specdec.model.kv_cache import SLOT_BLOCK, KVCache

ATTENTION_NAME = "specdec"
ATTENTION_KERNEL = "sdpa-row-per-batch-entry"
_HEAD_BLOCK = 4
_UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux")


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a session that attend to the same number of keys."""

    rows: slice | Tensor
    num_rows: int
    num_keys: int
    mask: Tensor  # [rows, 1, 1, L], 0 or -inf


@dataclasses.dataclass(frozen=True)
class Path:
    """Keys of the session's rows `slots_from`, in that order after the committed ones: a chain, or a branch of a tree.

    `blocks` hold the rows that attend here; a shared ancestor attends on the first path only.
    """

    slots_from: slice | Tensor
    num_slots: int
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """The rows [first_row, end_row) of a forward, which belong to one session."""

    cache: KVCache
    first_row: int
    end_row: int
    depths: tuple[int, ...]
    paths: tuple[Path, ...]

    @property
    def is_tree(self) -> bool:
        return isinstance(self.paths[0].slots_from, Tensor)


class AttentionBatch:
    """What attention needs in every layer of one forward, built once. Rows beyond the segments are padding."""

    def __init__(self, segments: Sequence[Segment], num_rows: int) -> None:
        self.segments, self.num_rows = segments, num_rows
        self.layers_run: list[int] = []
        self._query: Tensor | None = None
        self._output: Tensor | None = None

    def padded_query(self, query: Tensor) -> Tensor:
        """[M, H, G, D] to [M, H, G', D], G' a multiple of four; the padding heads are zero in every layer."""
        group = query.shape[2]
        if group % _HEAD_BLOCK == 0:
            return query
        if self._query is None:
            padded_group = -(-group // _HEAD_BLOCK) * _HEAD_BLOCK
            self._query = query.new_zeros(query.shape[0], query.shape[1], padded_group, query.shape[3])
        self._query[:, :, :group] = query
        return self._query

    def output(self, query: Tensor) -> Tensor:
        """[M, H, G, D], reused over the layers: a layer's output is consumed before the next layer attends."""
        if self._output is None:
            self._output = query.new_zeros(query.shape)
        return self._output


def plan_segment(
    cache: KVCache, first_row: int, num_rows: int, parent_rows: Sequence[int] | None, mask_dtype: torch.dtype
) -> Segment:
    """Lays out the rows of one session. `parent_rows[r]` is the row before r, -1 for the cache's last position.

    Raises ValueError where a parent does not come before its child.
    """
    base, device = cache.length, cache.layout.device
    end_row = first_row + num_rows
    if parent_rows is None or list(parent_rows) == list(range(-1, num_rows - 1)):
        depths = tuple(range(num_rows))
        blocks = _blocks(base, range(num_rows), depths, mask_dtype, device)
        return Segment(cache, first_row, end_row, depths, (Path(slice(0, num_rows), num_rows, blocks),))
    branches = _branches(parent_rows, num_rows)
    tree_depths = _depths(parent_rows)
    paths = tuple(
        Path(torch.tensor(branch, device=device), len(branch), _blocks(base, rows, tree_depths, mask_dtype, device))
        for branch, rows in branches
    )
    return Segment(cache, first_row, end_row, tree_depths, paths)


def _blocks(
    base: int, rows: Sequence[int], depths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Block, ...]:
    """Groups rows, which go deeper one by one, by the slot block that their last key lies in."""
    blocks = []
    for slot_block, members in itertools.groupby(rows, key=lambda row: (base + depths[row]) // SLOT_BLOCK):
        group = list(members)
        num_keys = (slot_block + 1) * SLOT_BLOCK
        mask = causal_mask([base + depths[row] for row in group], num_keys, dtype, device)
        # One run of rows is a view of the query; scattered rows of a tree are gathered.
        is_run = group[-1] - group[0] == len(group) - 1
        index = slice(group[0], group[-1] + 1) if is_run else torch.tensor(group, device=device)
        blocks.append(Block(index, len(group), num_keys, mask))
    return tuple(blocks)


def causal_mask(positions: Sequence[int], num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, 1, 1, L]: a row at position p sees the keys [0, p]."""
    hidden = torch.arange(num_keys, device=device) > torch.tensor(positions, device=device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None, :]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specdec_batch: AttentionBatch,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Writes keys and values [1, H, M, D] to the sessions' caches and attends for query [1, H * G, M, D].

    Returns [1, M, H * G, D]. The masks are the batch's own; `attention_mask` is not read.
    """
    for name in _UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
            raise ModelLoadError(f"attention with {name} is not supported")
    layer_index: int = module.layer_idx  # type: ignore[assignment]  # nn.Module: tensor or module
    specdec_batch.layers_run.append(layer_index)
    kv_heads, num_heads = key.shape[1], query.shape[1]
    group = num_heads // kv_heads
    grouped = query[0].view(kv_heads, group, query.shape[2], -1).permute(2, 0, 1, 3)  # [M, H, G, D]
    output = specdec_batch.output(grouped)  # [M, H, G, D]
    padded = specdec_batch.padded_query(grouped)
    for segment in specdec_batch.segments:
        rows = slice(segment.first_row, segment.end_row)
        _attend_segment(segment, layer_index, padded[rows], key[0, :, rows], value[0, :, rows], scaling, output[rows])
    return output.view(1, specdec_batch.num_rows, num_heads, -1), None


def _attend_segment(
    segment: Segment,
    layer_index: int,
    query: Tensor,  # [R, H, G', D]
    new_keys: Tensor,  # [H, R, D]
    new_values: Tensor,  # [H, R, D]
    scaling: float | None,
    output: Tensor,  # [R, H, G, D]
) -> None:
    cache, group = segment.cache, output.shape[2]
    base, num_rows = cache.length, segment.end_row - segment.first_row
    keys, values = cache.layer(layer_index)  # [H, C, D]
    for path in segment.paths:
        keys[:, base : base + path.num_slots] = new_keys[:, path.slots_from]
        values[:, base : base + path.num_slots] = new_values[:, path.slots_from]
        for block in path.blocks:
            attended = F.scaled_dot_product_attention(
                query[block.rows],
                keys[None, :, : block.num_keys].expand(block.num_rows, -1, -1, -1),
                values[None, :, : block.num_keys].expand(block.num_rows, -1, -1, -1),
                attn_mask=block.mask,
                scale=scaling,
            )
            output[block.rows] = attended[:, :, :group]
    if segment.is_tree:  # leave every row in its own slot, for `compact`
        keys[:, base : base + num_rows] = new_keys
        values[:, base : base + num_rows] = new_values


def _depths(parent_rows: Sequence[int]) -> tuple[int, ...]:
    depths: list[int] = []
    for row, parent in enumerate(parent_rows):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}: a parent comes before its child")
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(depths)


def _branches(parent_rows: Sequence[int], num_rows: int) -> list[tuple[list[int], list[int]]]:
    """For every leaf: the rows from its root to it, and those of them that no earlier branch holds."""
    if len(parent_rows) != num_rows:
        raise ValueError(f"{num_rows} rows need as many parents, not {len(parent_rows)}")
    _depths(parent_rows)
    inner, seen, branches = set(parent_rows), set[int](), []
    for leaf in (row for row in range(num_rows) if row not in inner):
        branch = [leaf]
        while parent_rows[branch[0]] >= 0:
            branch.insert(0, parent_rows[branch[0]])
        branches.append((branch, [row for row in branch if row not in seen]))
        seen.update(branch)
    return branches


AttentionInterface.register(ATTENTION_NAME, attend)
