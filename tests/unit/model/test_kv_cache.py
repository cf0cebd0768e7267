"""A session's view of the pool: blocks come and go with the length, and shared ones are never written."""

import pytest

from specdec.model.block_pool import BlockPool, OutOfBlocksError
from specdec.model.kv_cache import KVCache, KVStorage
from tests.unit.model.paged import LAYOUT, append, expected, make_pool, numbers

TEXT = list(range(100, 200))


@pytest.fixture
def room() -> tuple[BlockPool, KVStorage]:
    return make_pool(50)


def filled(room: tuple[BlockPool, KVStorage], num_tokens: int, salt: bytes = b"") -> KVCache:
    cache = KVCache(*room, salt)
    append(cache, room[1], [], TEXT[:num_tokens])
    return cache


def test_a_new_cache_holds_no_memory(room: tuple[BlockPool, KVStorage]) -> None:
    cache = KVCache(*room)
    assert (cache.length, cache.capacity, cache.num_bytes) == (0, 0, 0)


def test_a_cache_takes_blocks_as_it_grows_and_counts_their_bytes(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 33)
    assert cache.capacity == 48
    assert cache.num_bytes == 3 * 16 * LAYOUT.bytes_per_token == 3 * 16 * 2 * 2 * 3 * 4 * 4
    assert room[0].num_free_blocks == 47
    assert numbers(cache, room[1]) == expected(TEXT[:33])


def test_a_cache_does_not_grow_beyond_the_context(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 10)
    with pytest.raises(ValueError, match="do not fit a context of 700"):
        cache.reserve(701)
    assert cache.capacity == 16


def test_slots_count_only_after_they_are_reserved(room: tuple[BlockPool, KVStorage]) -> None:
    with pytest.raises(ValueError, match="reserved"):
        KVCache(*room).extend(1)


def test_out_of_blocks_changes_nothing() -> None:
    room = make_pool(4)
    one, two = filled(room, 32), filled(room, 5)
    with pytest.raises(OutOfBlocksError):
        two.reserve(33)
    assert (two.length, two.capacity, room[0].num_free_blocks) == (5, 16, 1)
    two.reserve(32)
    room[0].check([one.block_table, two.block_table])


def test_rollback_moves_the_length_and_only_backwards(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 10)
    cache.rollback(4)
    assert cache.length == 4
    for length in (5, -1):
        with pytest.raises(ValueError, match="rolled back"):
            cache.rollback(length)


def test_rollback_gives_back_all_blocks_beyond_the_length_but_one(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 90)
    cache.rollback(20)
    assert cache.capacity == 48
    assert numbers(cache, room[1]) == expected(TEXT[:20])
    room[0].check([cache.block_table])


def test_compaction_moves_a_path_of_a_tree_next_to_the_committed_slots(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 40)
    before = numbers(cache, room[1])
    cache.compact(13, [0, 2, 3, 6, 20])
    assert numbers(cache, room[1]) == before[:14] + [before[13 + row] for row in (2, 3, 6, 20)]
    room[0].check([cache.block_table])


def test_compaction_to_nothing_is_a_rollback_to_the_base(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 12)
    cache.compact(5, [])
    assert numbers(cache, room[1]) == expected(TEXT[:5])


@pytest.mark.parametrize(
    ("base_length", "kept_rows"), [(5, [2, 1]), (5, [1, 1]), (5, [0, 7]), (-1, []), (5, [-1]), (13, [])]
)
def test_compaction_refuses_rows_that_are_no_path(
    room: tuple[BlockPool, KVStorage], base_length: int, kept_rows: list[int]
) -> None:
    cache = filled(room, 12)
    with pytest.raises(ValueError, match="cache"):
        cache.compact(base_length, kept_rows)
    assert numbers(cache, room[1]) == expected(TEXT[:12])


def test_a_freed_cache_holds_no_memory_and_can_be_filled_again(room: tuple[BlockPool, KVStorage]) -> None:
    cache = filled(room, 12)
    cache.free()
    assert (cache.length, cache.num_bytes, room[0].num_free_blocks) == (0, 0, 50)
    append(cache, room[1], [], TEXT[:3])
    assert numbers(cache, room[1]) == expected(TEXT[:3])


def test_a_published_prefix_is_adopted_and_not_copied(room: tuple[BlockPool, KVStorage]) -> None:
    one, two = filled(room, 50), KVCache(*room)
    one.publish(TEXT[:50])
    assert two.adopt_prefix(TEXT) == 48
    assert two.block_table == one.block_table[:3]
    assert numbers(two, room[1]) == expected(TEXT[:48])
    room[0].check([one.block_table, two.block_table])


def test_a_prefix_outlives_the_session_that_computed_it(room: tuple[BlockPool, KVStorage]) -> None:
    one, two = filled(room, 50), KVCache(*room)
    one.publish(TEXT[:50])
    one.free()
    assert two.adopt_prefix(TEXT[:40]) == 32
    assert numbers(two, room[1]) == expected(TEXT[:32])


def test_the_last_token_is_never_adopted_since_its_logits_are_needed(room: tuple[BlockPool, KVStorage]) -> None:
    one, two = filled(room, 32), KVCache(*room)
    one.publish(TEXT[:32])
    assert two.adopt_prefix(TEXT[:32]) == 16
    assert KVCache(*room).adopt_prefix(TEXT[:33]) == 32
    assert KVCache(*room).adopt_prefix([]) == 0


def test_texts_that_differ_early_share_nothing_later(room: tuple[BlockPool, KVStorage]) -> None:
    one = filled(room, 48)
    one.publish(TEXT[:48])
    assert KVCache(*room).adopt_prefix([7, *TEXT[1:]]) == 0
    assert KVCache(*room).adopt_prefix([*TEXT[:20], 7, *TEXT[21:]]) == 16


def test_caches_of_another_salt_share_nothing(room: tuple[BlockPool, KVStorage]) -> None:
    filled(room, 48, salt=b"one tenant").publish(TEXT[:48])
    assert KVCache(*room, b"another").adopt_prefix(TEXT) == 0
    assert KVCache(*room).adopt_prefix(TEXT) == 0
    assert KVCache(*room, b"one tenant").adopt_prefix(TEXT) == 48


def test_two_sessions_that_computed_the_same_end_up_with_one_copy(room: tuple[BlockPool, KVStorage]) -> None:
    one, two = filled(room, 40), filled(room, 40)
    one.publish(TEXT[:40])
    two.publish(TEXT[:40])
    assert two.block_table[:2] == one.block_table[:2]
    assert two.block_table[2] != one.block_table[2]
    assert room[0].num_free_blocks == 50 - 4
    room[0].check([one.block_table, two.block_table])


def test_publishing_again_goes_on_where_it_stopped(room: tuple[BlockPool, KVStorage]) -> None:
    one = filled(room, 20)
    one.publish(TEXT[:20])
    append(one, room[1], TEXT[:20], TEXT[20:64])
    one.publish(TEXT)  # more than the cache holds does no harm
    assert KVCache(*room).adopt_prefix(TEXT) == 64
    with pytest.raises(ValueError, match="do not say"):
        one.publish(TEXT[:63])


@pytest.mark.parametrize("length", [17, 31, 33, 47])
def test_a_session_that_goes_another_way_inside_a_shared_block_writes_a_copy(
    room: tuple[BlockPool, KVStorage], length: int
) -> None:
    one, two = filled(room, 50), KVCache(*room)
    one.publish(TEXT[:50])
    two.adopt_prefix(TEXT)
    two.rollback(length)
    text = append(two, room[1], TEXT[:length], [1, 2, 3])
    assert numbers(two, room[1]) == expected(text)
    assert numbers(one, room[1]) == expected(TEXT[:50])
    room[0].check([one.block_table, two.block_table])
    assert KVCache(*room).adopt_prefix(TEXT) == 48


def test_the_only_holder_of_a_published_block_writes_it_in_place_and_nobody_finds_it(
    room: tuple[BlockPool, KVStorage],
) -> None:
    cache = filled(room, 40)
    cache.publish(TEXT[:40])
    blocks = cache.block_table
    cache.rollback(20)
    text = append(cache, room[1], TEXT[:20], range(30))
    assert cache.block_table[:2] == blocks[:2]
    assert KVCache(*room).adopt_prefix(TEXT) == 16
    cache.publish(text)
    assert KVCache(*room).adopt_prefix(text) == 48
    assert numbers(cache, room[1]) == expected(text)


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    room = make_pool(2)
    one, two = filled(room, 17), KVCache(*room)
    one.publish(TEXT[:17])
    two.adopt_prefix(TEXT)
    two.rollback(10)
    with pytest.raises(OutOfBlocksError):
        two.reserve(11)
    assert two.block_table == one.block_table[:1]
    assert numbers(one, room[1]) == expected(TEXT[:17])


def test_only_an_empty_cache_adopts(room: tuple[BlockPool, KVStorage]) -> None:
    with pytest.raises(ValueError, match="empty"):
        filled(room, 3).adopt_prefix(TEXT)
