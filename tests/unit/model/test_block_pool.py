"""The books of a pool: who holds a block, what can be found, what goes first."""

from typing import Any

import pytest

from specdec.model.block_pool import BlockLeakError, BlockPool, OutOfBlocksError


def published(pool: BlockPool, *contents: bytes) -> list[int]:
    """Blocks of these contents, held by nobody any more, the first one the longest ago."""
    blocks = pool.allocate(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.publish(block, content)
    for block in blocks:
        pool.release([block])
    return blocks


def test_blocks_come_back_when_nobody_holds_them() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert pool.num_free_blocks == 1
    pool.release(blocks)
    assert pool.num_free_blocks == 3
    pool.check([])


def test_too_large_a_wish_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    published(pool, b"a")
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    assert pool.find(b"a") is not None
    pool.check([held])


def test_a_cached_block_is_found_and_held_again() -> None:
    pool = BlockPool(2)
    (block,) = published(pool, b"a")
    assert pool.find(b"a") == block
    pool.hold(block)
    pool.hold(block)
    assert (pool.num_holders(block), pool.num_free_blocks) == (2, 1)
    pool.check([[block], [block]])


def test_the_block_that_was_held_the_longest_ago_goes_first() -> None:
    pool = BlockPool(3)
    published(pool, b"a", b"b", b"c")
    first = pool.find(b"a")
    assert first is not None
    pool.hold(first)  # used again: now "b" is the oldest
    pool.release([first])
    pool.allocate(1)
    assert [pool.find(content) is not None for content in (b"a", b"b", b"c")] == [True, False, True]


def test_free_blocks_are_taken_before_a_cached_one_is_forgotten() -> None:
    pool = BlockPool(2)
    published(pool, b"a")
    pool.allocate(1)
    assert pool.find(b"a") is not None


def test_of_a_session_that_ends_the_end_of_its_text_is_forgotten_first() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block, content in zip(blocks, (b"start", b"end"), strict=True):
        pool.publish(block, content)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find(b"start") is not None
    assert pool.find(b"end") is None


def test_only_published_blocks_are_shared() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not published"):
        pool.hold(block)


def test_a_content_is_published_once() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2)
    pool.publish(one, b"a")
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(two, b"a")
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(one, b"b")


def test_a_withdrawn_block_is_not_found() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.withdraw(block)
    assert pool.find(b"a") is None
    pool.release([block])
    pool.check([])


def test_a_block_cannot_be_given_back_twice() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="no holder"):
        pool.release(blocks)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0]], "held 0 times and counted 1"),  # a leak: the cache of block 1 is gone
        ([[0], [1], [1]], "held 2 times and counted 1"),
        ([[0], [1], [2]], "held 1 times and counted 0"),  # used after it was given back
        ([[0, 0], [1]], "twice"),
    ],
)
def test_the_check_names_what_is_wrong(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    pool.check([[0], [1]])
    with pytest.raises(BlockLeakError, match=message):
        pool.check(tables)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._free.append(0), "free or cached"),
        (lambda pool: pool._block_by_hash.update({b"b": 1}), "one to one"),
        (lambda pool: pool._hash_by_block.clear(), "one to one"),
    ],
)
def test_the_check_looks_at_the_pool_too(break_it: Any, message: str) -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.publish(held[0], b"a")
    pool.check([held])
    break_it(pool)
    with pytest.raises(BlockLeakError, match=message):
        pool.check([held])
