"""Caches whose slots hold numbers that say what they should be: what tests of the paged cache use for a model."""

import hashlib
from collections.abc import Sequence

import torch

from specdec.model.block_pool import BlockPool
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage

LAYOUT = CacheLayout(
    num_layers=2, num_kv_heads=3, head_size=4, dtype=torch.float32, device=torch.device("cpu"), context_limit=700
)


def make_pool(num_blocks: int, layout: CacheLayout = LAYOUT) -> tuple[BlockPool, KVStorage]:
    return BlockPool(num_blocks), KVStorage(layout, num_blocks)


def content(token_ids: Sequence[int]) -> float:
    """A number for the last of these tokens that depends on all of them, as its keys do."""
    digest = hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=2).digest()
    return float(int.from_bytes(digest))


def write(cache: KVCache, storage: KVStorage, slot: int, number: float) -> None:
    """As a forward does: `number` in every key of the slot, and its negative in every value."""
    block, place = cache.block_table[slot // 16], slot % 16
    for keys, values in zip(storage.keys, storage.values, strict=True):
        keys[block, :, place] = number
        values[block, :, place] = -number


def numbers(cache: KVCache, storage: KVStorage) -> list[float]:
    """What the slots [0, length) hold; fails where heads, layers, keys and values do not agree."""
    found = []
    for slot in range(cache.length):
        block, place = cache.block_table[slot // 16], slot % 16
        slots = torch.stack([keys[block, :, place] for keys in storage.keys])  # [N, H, D]
        opposites = torch.stack([values[block, :, place] for values in storage.values])
        assert torch.equal(slots, -opposites)
        assert (slots == slots[0, 0, 0]).all()
        found.append(float(slots[0, 0, 0]))
    return found


def append(cache: KVCache, storage: KVStorage, token_ids: Sequence[int], new_ids: Sequence[int]) -> list[int]:
    """Forwards `new_ids` after `token_ids`, which the cache holds. Returns all of them."""
    text = list(token_ids)
    cache.reserve(cache.length + len(new_ids))
    for token_id in new_ids:
        text.append(token_id)
        write(cache, storage, len(text) - 1, content(text))
    cache.extend(len(new_ids))
    return text


def expected(token_ids: Sequence[int]) -> list[float]:
    return [content(token_ids[: end + 1]) for end in range(len(token_ids))]
