"""Attention over many sessions in one forward, with the same bits for a row however it came to run.

Registered with `transformers.AttentionInterface`, so modelling code stays as it is; without a mask function of that
name, transformers builds no mask of its own. What keeps the bits:
- every row is a batch entry of its own, its grouped heads the query block; so the block's shape never depends on the batch;
- query blocks are padded to a multiple of four heads, keys to a multiple of 64 slots under a mask;
- a tree row reads its ancestors' keys in the order a chain would have them. A path of the tree is written right after
  the committed keys, its rows attend, and the next path follows: no committed key is ever copied.

Legend: M rows of the forward, R rows of one session, H key-value heads, G query heads per key-value head, D head size,
L keys under the mask.
"""

import dataclasses
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
class Path:
    """Rows that see the committed keys and then those of `slots_from` in order: a chain, or one branch of a tree.

    `rows` says which of the session's rows attend here; a shared ancestor attends on the first path only.
    """

    rows: slice | Tensor
    slots_from: slice | Tensor
    num_slots: int
    num_keys: int
    mask: Tensor  # [rows, 1, 1, L], 0 or -inf


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
        whole = slice(0, num_rows)
        mask = causal_mask(base, depths, mask_dtype, device)
        return Segment(cache, first_row, end_row, depths, (Path(whole, whole, num_rows, mask.shape[-1], mask),))
    branches = _branches(parent_rows, num_rows)
    tree_depths = _depths(parent_rows)
    paths = []
    for branch, rows in branches:
        mask = causal_mask(base, [tree_depths[row] for row in rows], mask_dtype, device)
        row_index = torch.tensor(rows, device=device)
        branch_index = torch.tensor(branch, device=device)
        paths.append(Path(row_index, branch_index, len(branch), mask.shape[-1], mask))
    return Segment(cache, first_row, end_row, tree_depths, tuple(paths))


def causal_mask(base: int, depths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, 1, 1, L]: a row at depth d sees the keys [0, base + d]."""
    num_keys = -(-(base + max(depths) + 1) // SLOT_BLOCK) * SLOT_BLOCK
    last_seen = torch.tensor(depths, device=device) + base
    hidden = torch.arange(num_keys, device=device) > last_seen[:, None]
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
        path_query = query[path.rows]
        batch_size = path_query.shape[0]
        attended = F.scaled_dot_product_attention(
            path_query,
            keys[None, :, : path.num_keys].expand(batch_size, -1, -1, -1),
            values[None, :, : path.num_keys].expand(batch_size, -1, -1, -1),
            attn_mask=path.mask,
            scale=scaling,
        )
        output[path.rows] = attended[:, :, :group]
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
