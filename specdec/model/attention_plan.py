"""Which keys each row of a forward sees and where its own go, as flat arrays that any device's kernel can read.

Built once per forward and used in every layer. Knows block tables, positions and trees; refuses to know tensors of keys
and how they are summed.

Legend: M rows of the forward with padding, S sessions, W blocks of the longest table, A rows of the deepest tree path.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.kv_cache import KVCache

NO_SLOT = -1


class AttentionOptions(NamedTuple):
    """Of one layer. The row at position p sees the keys [max(0, p + 1 - sliding_window), p]."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[Hq] float32: a score per head that takes part in the softmax and has no value."""


@dataclasses.dataclass(frozen=True)
class SessionRows:
    """Rows to append to a cache: a chain, unless `parent_rows` says which row each one follows, -1 for the cache."""

    cache: KVCache
    num_rows: int
    parent_rows: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The row at position p sees the keys [0, p]. Those below `num_direct_keys` lie in the slots of their own number,
    key p of the others in `ancestor_slots[row, p - num_direct_keys[row]]`: the rows of a tree that lead to this one.
    """

    positions: NDArray[np.int64]  # [M], 0 for padding
    num_keys: NDArray[np.int32]  # [M], 0 for padding
    num_direct_keys: NDArray[np.int32]  # [M]
    ancestor_slots: NDArray[np.int32]  # [M, A]
    sessions: NDArray[np.int32]  # [M]
    block_tables: NDArray[np.int32]  # [S, W]
    write_slots: NDArray[np.int64]  # [M], block * 16 + place of the row's own key, -1 for padding
    first_rows: NDArray[np.int32]  # [S + 1], the rows of session s are [first_rows[s], first_rows[s + 1])


def refuse_bad_tree(num_rows: int, parent_rows: Sequence[int] | None) -> None:
    """Raises ValueError unless every row follows the cache or a row before it."""
    if parent_rows is None:
        return
    if len(parent_rows) != num_rows:
        raise ValueError(f"{num_rows} rows need as many parents, not {len(parent_rows)}")
    for row, parent in enumerate(parent_rows):
        if not -1 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}: a parent comes before its child")


def plan_attention(sessions: Sequence[SessionRows], num_rows: int) -> AttentionPlan:
    """Lays out the rows of all sessions, in their order, and padding up to `num_rows`.

    The caches have reserved the slots of their rows, and stay as they are until the forward is done.
    """
    counts = np.array([session.num_rows for session in sessions], dtype=np.int32)
    first_rows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_real = int(first_rows[-1])
    bases = np.repeat(np.array([session.cache.length for session in sessions], dtype=np.int32), counts)
    row_sessions = np.zeros(num_rows, dtype=np.int32)
    row_sessions[:num_real] = np.repeat(np.arange(len(sessions), dtype=np.int32), counts)
    rows_within = np.arange(num_real, dtype=np.int32) - np.repeat(first_rows[:-1], counts)

    widths = [len(session.cache.table) for session in sessions]
    block_tables = np.zeros((len(sessions), max(widths)), dtype=np.int32)
    for table, session, width in zip(block_tables, sessions, widths, strict=True):
        table[:width] = session.cache.table

    depths, num_direct_keys = rows_within.copy(), np.zeros(num_rows, dtype=np.int32)
    num_direct_keys[:num_real] = bases + depths + 1
    ancestor_slots = np.zeros((num_rows, 0), dtype=np.int32)
    for session, first_row, base in zip(sessions, first_rows, bases[first_rows[:-1]], strict=False):
        if session.parent_rows is None or list(session.parent_rows) == list(range(-1, session.num_rows - 1)):
            continue
        paths = _paths(session.parent_rows)
        ancestor_slots = _widened(ancestor_slots, max(map(len, paths)))
        for row, path in enumerate(paths, start=int(first_row)):
            depths[row] = len(path) - 1
            ancestor_slots[row, : len(path)] = path
            ancestor_slots[row, : len(path)] += base
            num_direct_keys[row] = base

    positions = np.zeros(num_rows, dtype=np.int64)
    positions[:num_real] = bases + depths
    num_keys = np.zeros(num_rows, dtype=np.int32)
    num_keys[:num_real] = positions[:num_real] + 1
    own_blocks, own_places = np.divmod(bases + rows_within, BLOCK_SIZE)
    write_slots = np.full(num_rows, NO_SLOT, dtype=np.int64)
    write_slots[:num_real] = (
        block_tables[row_sessions[:num_real], own_blocks].astype(np.int64) * BLOCK_SIZE + own_places
    )
    return AttentionPlan(
        positions, num_keys, num_direct_keys, ancestor_slots, row_sessions, block_tables, write_slots, first_rows
    )


def _paths(parent_rows: Sequence[int]) -> list[list[int]]:
    """For every row: the rows from its root to it."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parent_rows):
        paths.append([*paths[parent], row] if parent >= 0 else [row])
    return paths


def _widened(slots: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    missing = width - slots.shape[1]
    return np.pad(slots, ((0, 0), (0, missing))) if missing > 0 else slots
