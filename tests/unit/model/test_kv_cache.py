import pytest
import torch

from specdec.model.kv_cache import CacheLayout, KVCache

LAYOUT = CacheLayout(
    num_layers=2, num_kv_heads=3, head_size=4, dtype=torch.float32, device=torch.device("cpu"), context_limit=700
)


def filled_cache(num_slots: int) -> KVCache:
    """A cache whose slot s holds the number s in every key, and -s in every value."""
    cache = KVCache(LAYOUT)
    cache.reserve(num_slots)
    for layer_index in range(LAYOUT.num_layers):
        keys, values = cache.layer(layer_index)
        with torch.inference_mode():
            keys[:, :num_slots] = torch.arange(num_slots, dtype=torch.float32)[None, :, None]
            values[:, :num_slots] = -torch.arange(num_slots, dtype=torch.float32)[None, :, None]
    cache.extend(num_slots)
    return cache


def slots(cache: KVCache) -> list[int]:
    keys, values = cache.layer(1)
    assert torch.equal(keys[0, : cache.length], -values[2, : cache.length])
    return keys[0, : cache.length, 0].int().tolist()


def test_a_new_cache_holds_no_memory() -> None:
    assert KVCache(LAYOUT).num_bytes == 0


def test_growing_keeps_what_is_cached_and_doubles_the_room() -> None:
    cache = filled_cache(200)
    before = cache.capacity
    cache.reserve(before + 1)
    assert cache.capacity == 2 * before
    assert slots(cache) == list(range(200))
    assert cache.num_bytes == cache.capacity * LAYOUT.bytes_per_token


def test_a_cache_does_not_grow_beyond_the_context_by_more_than_a_block() -> None:
    cache = filled_cache(500)
    cache.reserve(700)
    assert cache.capacity == 704
    with pytest.raises(ValueError, match="do not fit"):
        cache.reserve(701)


def test_rollback_moves_the_length_and_only_backwards() -> None:
    cache = filled_cache(10)
    cache.rollback(4)
    assert cache.length == 4
    with pytest.raises(ValueError, match="rolled back"):
        cache.rollback(5)
    with pytest.raises(ValueError, match="rolled back"):
        cache.rollback(-1)


def test_compaction_moves_a_path_of_a_tree_next_to_the_committed_slots() -> None:
    cache = filled_cache(12)
    cache.compact(5, [0, 2, 3, 6])
    assert slots(cache) == [0, 1, 2, 3, 4, 5, 7, 8, 11]


def test_compaction_to_nothing_is_a_rollback_to_the_base() -> None:
    cache = filled_cache(12)
    cache.compact(5, [])
    assert slots(cache) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("base_length", "kept_rows"), [(5, [2, 1]), (5, [1, 1]), (5, [0, 7]), (-1, []), (5, [-1]), (13, [])]
)
def test_compaction_refuses_rows_that_are_no_path(base_length: int, kept_rows: list[int]) -> None:
    cache = filled_cache(12)
    with pytest.raises(ValueError, match="cache"):
        cache.compact(base_length, kept_rows)
    assert slots(cache) == list(range(12))


def test_a_freed_cache_holds_no_memory_and_can_be_filled_again() -> None:
    cache = filled_cache(12)
    cache.free()
    assert (cache.length, cache.num_bytes) == (0, 0)
    cache.reserve(3)
    cache.extend(3)
    assert cache.length == 3


def test_slots_count_only_after_they_are_reserved() -> None:
    with pytest.raises(ValueError, match="reserved"):
        KVCache(LAYOUT).extend(1)
