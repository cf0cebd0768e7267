"""Paged storage of keys and values, and each session's view of it: a block table and a length.

Rolling back is moving the length; what lies beyond it is never read. Blocks are shared between sessions only when they
are full and published, and a session that would write into such a block takes another first. Knows slots, lengths and
what a block's tokens hash to; refuses to know sessions' names and what attention does with the keys.

Legend: N layers, H key-value heads, D head size. Slot s of a cache lies in its block s // 16, at s % 16.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.model.block_pool import BLOCK_SIZE, BlockPool

_HASH_BYTES = 16


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    context_limit: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return BLOCK_SIZE * self.bytes_per_token


class KVStorage:
    """The memory of a pool. Untouched blocks cost address space only, and hold garbage."""

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        self.layout = layout
        shape = (layout.num_layers, 2, num_blocks, layout.num_kv_heads, BLOCK_SIZE, layout.head_size)
        self._slots = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        self.keys = [layer[0] for layer in self._slots]
        """Per layer, [blocks, H, 16, D]."""
        self.values = [layer[1] for layer in self._slots]

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        self._slots[:, :, target] = self._slots[:, :, source]

    def move_slots(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Both number slots of the storage: block * 16 + place. Sources are read before any target is written."""
        source_blocks, source_places = (torch.from_numpy(part) for part in np.divmod(sources, BLOCK_SIZE))
        target_blocks, target_places = (torch.from_numpy(part) for part in np.divmod(targets, BLOCK_SIZE))
        self._slots[:, :, target_blocks, :, target_places] = self._slots[:, :, source_blocks, :, source_places]


class KVCache:
    """Slots [0, length) hold the keys and values of the session's first `length` positions.

    `salt` separates prefixes that must not be shared, such as those of different tenants.
    """

    def __init__(self, pool: BlockPool, storage: KVStorage, salt: bytes = b"") -> None:
        self._pool, self._storage = pool, storage
        self._length = 0
        self._blocks: list[int] = []
        self._table = np.zeros(8, dtype=np.int32)  # the same numbers, for attention
        self._root_hash = hashlib.blake2b(salt, digest_size=_HASH_BYTES).digest()
        self._hashes: list[bytes] = []  # of the first blocks, those that are published

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        """Slots in the blocks that the cache holds."""
        return len(self._blocks) * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks held. A shared block counts for each of its holders."""
        return len(self._blocks) * self._storage.layout.bytes_per_block

    @property
    def context_limit(self) -> int:
        return self._storage.layout.context_limit

    @property
    def block_table(self) -> Sequence[int]:
        return tuple(self._blocks)

    @property
    def table(self) -> NDArray[np.int32]:
        """The block table as attention reads it: a view that holds until the next change."""
        return self._table[: len(self._blocks)]

    def num_blocks_wanted(self, num_slots: int) -> int:
        """How many blocks `reserve(num_slots)` would take from the pool."""
        copies = sum(self._pool.num_holders(block) > 1 for block in self._blocks[self._length // BLOCK_SIZE :])
        return max(0, _num_blocks(num_slots) - len(self._blocks)) + copies

    def reserve(self, num_slots: int) -> None:
        """Makes the slots [length, num_slots) writable: takes blocks, and a copy of a shared one.

        Raises ValueError beyond the context limit and OutOfBlocksError; then nothing has changed.
        """
        if num_slots > self.context_limit:
            raise ValueError(f"{num_slots} positions do not fit a context of {self.context_limit}")
        first_written = self._length // BLOCK_SIZE
        if num_slots <= self._length or (num_slots <= self.capacity and len(self._hashes) <= first_written):
            return  # nearly always: what is to be written is the cache's own already
        fresh = self._pool.allocate(self.num_blocks_wanted(num_slots))
        for index in range(first_written, len(self._blocks)):
            block = self._blocks[index]
            if self._pool.num_holders(block) > 1:
                replacement = fresh.pop()
                self._storage.copy_block(block, replacement)
                self._pool.release([block])
                self._put(index, replacement)
            elif self._pool.is_published(block):
                self._pool.withdraw(block)
        del self._hashes[first_written:]
        for block in fresh:
            self._append(block)

    def extend(self, num_slots: int) -> None:
        """Counts `num_slots` slots, written beyond the old length, as part of the cache."""
        if not 0 <= num_slots <= self.capacity - self._length:
            raise ValueError("slots must be reserved before they are counted")
        self._length += num_slots

    def rollback(self, length: int) -> None:
        """Forgets every position from `length` on. Of the blocks beyond it one is kept, for the next draft."""
        if not 0 <= length <= self._length:
            raise ValueError(f"a cache of {self._length} positions cannot be rolled back to {length}")
        self._length = length
        kept = _num_blocks(length)
        if len(self._blocks) > kept and not self._pool.is_published(self._blocks[kept]):
            kept += 1
        self._drop_blocks(kept)

    @torch.inference_mode()
    def compact(self, base_length: int, kept_rows: Sequence[int]) -> None:
        """After a tree: keeps, of the rows appended at `base_length`, those of one path, moved next to each other.

        Row r of the forward lies in slot base_length + r. `kept_rows` ascend, as any path from a root does.
        """
        slots = [base_length + row for row in kept_rows]
        ascending = all(left < right for left, right in itertools.pairwise(slots))
        if base_length < 0 or not ascending or (slots and not base_length <= slots[0] <= slots[-1] < self._length):
            raise ValueError("kept rows must ascend and lie between the base length and the cache's length")
        end = base_length + len(slots)
        first_moved = next((row for row, slot in enumerate(slots) if slot != base_length + row), len(slots))
        if first_moved < len(slots):
            targets = np.arange(base_length + first_moved, end)
            self._storage.move_slots(self._places(np.array(slots[first_moved:])), self._places(targets))
        self.rollback(end)

    def adopt_prefix(self, token_ids: Sequence[int]) -> int:
        """Fills an empty cache with the longest run of published blocks that hold the beginning of `token_ids`.

        Never with the last token, whose logits are needed. Returns the new length.
        """
        if self._length:
            raise ValueError("only an empty cache can adopt a prefix")
        self._drop_blocks(0)
        for index in range((len(token_ids) - 1) // BLOCK_SIZE):
            content_hash = self._hash_of_block(index, token_ids)
            block = self._pool.find(content_hash)
            if block is None:
                break
            self._pool.hold(block)
            self._append(block)
            self._hashes.append(content_hash)
        self._length = self.capacity
        return self._length

    def publish(self, token_ids: Sequence[int]) -> None:
        """Lets full blocks be found by other caches. The first `length` positions hold the first of `token_ids`.

        Where another block of the same content is published already, this cache takes that one and gives its own back:
        both hold the same bits.
        """
        if len(token_ids) < self._length:
            raise ValueError(f"{len(token_ids)} tokens do not say what {self._length} positions hold")
        for index in range(len(self._hashes), self._length // BLOCK_SIZE):
            content_hash = self._hash_of_block(index, token_ids)
            block, known = self._blocks[index], self._pool.find(content_hash)
            if known is None:
                self._pool.publish(block, content_hash)
            else:
                self._pool.hold(known)
                self._pool.release([block])
                self._put(index, known)
            self._hashes.append(content_hash)

    def free(self) -> None:
        """Gives every block back. The cache is then empty."""
        self._length = 0
        self._drop_blocks(0)

    def slot_places(self, start: int, end: int) -> NDArray[np.int64]:
        """Where the slots [start, end) lie in the storage: block * 16 + place."""
        return self._places(np.arange(start, end))

    def _places(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        blocks, places = np.divmod(slots, BLOCK_SIZE)
        return self._table[blocks].astype(np.int64) * BLOCK_SIZE + places

    def _hash_of_block(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Of this block's tokens and all before them: its keys depend on every one. Needs the hashes before it."""
        content = np.asarray(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE], dtype="<i8").tobytes()
        before = self._hashes[index - 1] if index else self._root_hash
        return hashlib.blake2b(before + content, digest_size=_HASH_BYTES).digest()

    def _append(self, block: int) -> None:
        self._blocks.append(block)
        if len(self._blocks) > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._put(len(self._blocks) - 1, block)

    def _put(self, index: int, block: int) -> None:
        self._blocks[index] = self._table[index] = block

    def _drop_blocks(self, num_kept: int) -> None:
        dropped = self._blocks[num_kept:]
        del self._blocks[num_kept:]
        del self._hashes[num_kept:]
        self._pool.release(dropped)


def _num_blocks(num_slots: int) -> int:
    return -(-num_slots // BLOCK_SIZE)
