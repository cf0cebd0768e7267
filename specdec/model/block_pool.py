"""Who holds which block of the paged cache, and which full blocks can be found again by what they contain.

A block is BLOCK_SIZE positions of every layer. It is free; or held, by one cache or, once its content is published, by
several; or cached: published, held by nobody, and the first to go, least recently used first, when free ones run out.
Knows numbers of blocks and hashes; refuses to know tensors, tokens and sessions.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16


class OutOfBlocksError(MemoryError):
    """More blocks are wanted than there are free or cached ones. Nothing has changed."""


class BlockLeakError(RuntimeError):
    """The pool's books do not agree with the block tables of the caches that live."""


class BlockPool:
    """Counts the holders of every block. A published block must not be written: `withdraw` it or take another."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: memory touched before is used again first
        self._num_holders = [0] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def num_free_blocks(self) -> int:
        """How many blocks can be had now: the free ones, and the cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one holder each and any content. Raises OutOfBlocksError."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{num_blocks} blocks are wanted, {self.num_free_blocks} of {self.num_blocks} are free"
            )
        while len(self._free) < num_blocks:
            block, _ = self._cached.popitem(last=False)
            self.withdraw(block)
            self._free.append(block)
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def hold(self, block: int) -> None:
        """One more holder of a published block."""
        if block not in self._hash_by_block:
            raise ValueError(f"block {block} is not published, so it is not to be shared")
        self._cached.pop(block, None)
        self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. Of blocks that become cached, later ones of the sequence go before earlier ones."""
        for block in reversed(blocks):
            if self._num_holders[block] < 1:
                raise ValueError(f"block {block} has no holder")
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self._hash_by_block:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def find(self, content_hash: bytes) -> int | None:
        """The published block of this content, if there is one."""
        return self._block_by_hash.get(content_hash)

    def publish(self, block: int, content_hash: bytes) -> None:
        """Lets a held block be found. Raises ValueError for a content that is published already."""
        if content_hash in self._block_by_hash or block in self._hash_by_block or self._num_holders[block] < 1:
            raise ValueError(f"block {block} cannot be published")
        self._block_by_hash[content_hash] = block
        self._hash_by_block[block] = content_hash

    def withdraw(self, block: int) -> None:
        """The block is no longer found; its content may change."""
        del self._block_by_hash[self._hash_by_block.pop(block)]

    def is_published(self, block: int) -> bool:
        return block in self._hash_by_block

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Compares the books with the block tables of all live caches.

        Raises BlockLeakError: a block counted wrongly, shared without being published, free and held, or lost.
        """
        holders: Counter[int] = Counter()
        for table in held:
            if len(set(table)) != len(table):
                raise BlockLeakError(f"a table holds a block twice: {list(table)}")
            holders.update(table)
        for block in range(self.num_blocks):
            if self._num_holders[block] != holders[block]:
                raise BlockLeakError(
                    f"block {block} is held {holders[block]} times and counted {self._num_holders[block]} times"
                )
            if holders[block] > 1 and block not in self._hash_by_block:
                raise BlockLeakError(f"block {block} is shared and not published")
        idle = sorted([*self._free, *self._cached])
        if idle != [block for block in range(self.num_blocks) if not holders[block]]:
            raise BlockLeakError("the blocks that nobody holds are not those that are free or cached")
        if {block: content_hash for content_hash, block in self._block_by_hash.items()} != self._hash_by_block:
            raise BlockLeakError("the index of published blocks is not one to one")
        if any(block not in self._hash_by_block for block in self._cached):
            raise BlockLeakError("a cached block is not published")
        if any(block in self._hash_by_block for block in self._free):
            raise BlockLeakError("a free block is published")
