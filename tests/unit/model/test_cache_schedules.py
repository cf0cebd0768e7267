"""Many caches over a small pool, used in any order: books in balance and every slot right after each step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from specdec.model.block_pool import OutOfBlocksError
from specdec.model.kv_cache import KVCache
from tests.unit.model.paged import append, content, expected, make_pool, numbers, write

NUM_BLOCKS = 12
SALTS = (b"", b"another tenant")
# Few different tokens, so that texts often begin alike.
TOKENS = st.integers(0, 1)


class CacheSchedules(RuleBasedStateMachine):
    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.storage = make_pool(NUM_BLOCKS)
        for layer in (*self.storage.keys, *self.storage.values):
            layer.fill_(float("nan"))
        self.texts: dict[KVCache, list[int]] = {}
        self.salts: dict[KVCache, bytes] = {}

    def new_cache(self, salt: bytes) -> KVCache:
        cache = KVCache(self.pool, self.storage, salt)
        self.texts[cache], self.salts[cache] = [], salt
        return cache

    @rule(target=caches, salt=st.sampled_from(SALTS))
    def open(self, salt: bytes) -> KVCache:
        return self.new_cache(salt)

    @rule(cache=caches, token_id=TOKENS, num_tokens=st.integers(1, 40))
    def forward(self, cache: KVCache, token_id: int, num_tokens: int) -> None:
        before, new_ids = self.texts[cache], [token_id] * num_tokens
        wanted, free = cache.num_blocks_wanted(cache.length + num_tokens), self.pool.num_free_blocks
        table = cache.block_table
        try:
            self.texts[cache] = append(cache, self.storage, before, new_ids)
            assert wanted <= free
        except OutOfBlocksError:
            assert wanted > free
            assert cache.block_table == table

    @rule(cache=caches, data=st.data())
    def roll_back(self, cache: KVCache, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, cache.length))
        cache.rollback(length)
        del self.texts[cache][length:]
        assert cache.capacity <= -(-length // 16) * 16 + 16

    @rule(cache=caches, num_rows=st.integers(1, 20), data=st.data())
    def commit_a_path_of_a_tree(self, cache: KVCache, num_rows: int, data: st.DataObject) -> None:
        base, text = cache.length, self.texts[cache]
        kept_rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1))))
        try:
            cache.reserve(base + num_rows)
        except OutOfBlocksError:
            return
        for row in range(num_rows):
            write(cache, self.storage, base + row, float(-row))
        for depth, row in enumerate(kept_rows):
            text = [*text, depth % 2]
            write(cache, self.storage, base + row, content(text))
        cache.extend(num_rows)
        cache.compact(base, kept_rows)
        self.texts[cache] = text

    @rule(cache=caches)
    def publish(self, cache: KVCache) -> None:
        cache.publish(self.texts[cache])

    @rule(target=caches, source=caches, more=st.lists(TOKENS, max_size=40), data=st.data())
    def open_with_a_text_that_begins_like_another(
        self, source: KVCache, more: list[int], data: st.DataObject
    ) -> KVCache:
        text = [*self.texts[source][: data.draw(st.integers(0, source.length))], *more]
        cache = self.new_cache(data.draw(st.sampled_from(SALTS)))
        length = cache.adopt_prefix(text)
        assert length % 16 == 0
        assert length < max(1, len(text))
        self.texts[cache] = text[:length]
        return cache

    @rule(cache=caches)
    def free(self, cache: KVCache) -> None:
        cache.free()
        self.texts[cache] = []

    @invariant()
    def the_books_are_in_balance(self) -> None:
        self.pool.check([cache.block_table for cache in self.texts])

    @invariant()
    def every_slot_holds_what_its_text_says(self) -> None:
        for cache, text in self.texts.items():
            assert cache.length == len(text)
            assert numbers(cache, self.storage) == expected(text)

    @invariant()
    def nothing_is_shared_between_tenants(self) -> None:
        held = {salt: {b for c, own in self.salts.items() if own == salt for b in c.block_table} for salt in SALTS}
        assert not held[SALTS[0]] & held[SALTS[1]]


TestCacheSchedules = CacheSchedules.TestCase
TestCacheSchedules.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
