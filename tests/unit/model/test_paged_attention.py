"""The kernel against softmax written out in float64, and against itself: the same bits however a row came to run."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.errors import ModelLoadError
from specdec.model.attention_plan import AttentionOptions, AttentionPlan, SessionRows, plan_attention, refuse_bad_tree
from specdec.model.block_pool import BlockPool
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.paged_attention import paged_attention

NUM_BLOCKS = 64
DTYPES = [torch.float32, torch.bfloat16]
# key-value heads, query heads for each, head size: grouped, one key-value head, one query head each, odd sizes
SHAPES = [(2, 6, 16), (3, 3, 64), (1, 4, 20), (4, 1, 8), (2, 2, 5), (1, 15, 128)]
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6, 6)
TREE_LEAF_PATH = (0, 1, 3, 6, 9)


class Attention:
    """One layer's attention over a pool that is full of NaN wherever nothing was written."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, **options: object) -> None:
        self.kv_heads, self.group, self.head_size = shape
        self.dtype = dtype
        layout = CacheLayout(2, self.kv_heads, self.head_size, dtype, torch.device("cpu"), 16 * NUM_BLOCKS)
        self.pool, self.storage = BlockPool(NUM_BLOCKS), KVStorage(layout, NUM_BLOCKS)
        for slots in (*self.storage.keys, *self.storage.values):
            slots.fill_(float("nan"))
        self.kernel = paged_attention(self.storage, 1024)
        self.options = AttentionOptions(scaling=self.head_size**-0.5, **options)  # type: ignore[arg-type]

    def new_cache(self) -> KVCache:
        return KVCache(self.pool, self.storage)

    def states(self, seed: int, num_rows: int) -> "States":
        """Rows of a text: equal seeds begin alike."""
        generator = torch.Generator().manual_seed(seed)
        width = self.kv_heads * (self.group + 2) * self.head_size
        rows = torch.randn(1024, width, generator=generator)[:num_rows].to(self.dtype)
        return States(self, rows)

    def forward(self, *parts: "tuple[KVCache, States] | tuple[KVCache, States, Sequence[int]]") -> list[Tensor]:
        """Appends the rows of each part to its cache; returns [R, Hq, D] each."""
        sessions = [SessionRows(part[0], part[1].num_rows, part[2] if len(part) == 3 else None) for part in parts]
        for session in sessions:
            session.cache.reserve(session.cache.length + session.num_rows)
        counts = [session.num_rows for session in sessions]
        num_rows = sum(counts) + 2  # two rows of padding
        plan = plan_attention(sessions, num_rows)
        query, key, value = (
            torch.cat(
                [
                    *(getattr(part[1], name) for part in parts),
                    torch.full_like(getattr(parts[0][1], name)[:1], 7).expand(2, -1, -1),
                ]
            )
            for name in ("query", "key", "value")
        )
        query = query.transpose(0, 1).contiguous().transpose(0, 1)  # heads first in memory, as models have them
        output = torch.full((num_rows, self.kv_heads * self.group, self.head_size), float("nan"), dtype=self.dtype)
        self.kernel.attend(1, query, key, value, output, plan, self.options)
        assert (output[-2:] == 0).all()
        for session in sessions:
            session.cache.extend(session.num_rows)
        return list(output[:-2].split(counts))  # type: ignore[no-untyped-call]


class States:
    """Query [R, Hq, D], key and value [R, H, D] of some rows."""

    def __init__(self, attention: Attention, rows: Tensor) -> None:
        self.attention, self.rows = attention, rows
        num_rows, heads, size = len(rows), attention.kv_heads, attention.head_size
        sizes = [heads * attention.group * size, heads * size, heads * size]
        query, key, value = rows.split(sizes, dim=1)  # type: ignore[no-untyped-call]
        self.query = query.reshape(num_rows, heads * attention.group, size)
        self.key, self.value = key.reshape(num_rows, heads, size), value.reshape(num_rows, heads, size)
        self.num_rows = num_rows

    def __getitem__(self, rows: slice | Sequence[int]) -> "States":
        return States(self.attention, self.rows[rows])

    def attended(self) -> Tensor:
        """What attention over these rows as one text is, [R, Hq, D] float64."""
        options, group = self.attention.options, self.attention.group
        query, key, value = self.query.double(), self.key.double(), self.value.double()
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        ages = torch.arange(self.num_rows)[:, None] - torch.arange(self.num_rows)
        hidden = (ages < 0) | (ages >= (options.sliding_window or self.num_rows))
        scores = scores.masked_fill(hidden, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.double()[:, None, None].expand(-1, self.num_rows, 1)
            weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[:, :, :-1]
        else:
            weights = scores.softmax(dim=2)
        return torch.einsum("hqk,khd->qhd", weights, value)


def assert_close(output: Tensor, expected: Tensor) -> None:
    # float32: some hundred sums of numbers around 1. bfloat16: half a unit in the last place of the result.
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-8}[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_softmax_over_all_keys_before(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    attention = Attention(shape, dtype)
    text = attention.states(1, 150)
    cache = attention.new_cache()
    outputs = [attention.forward((cache, text[a:b]))[0] for a, b in ((0, 37), (37, 38), (38, 80), (80, 150))]
    assert_close(torch.cat(outputs), text.attended())


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 13},
        {"sliding_window": 64},
        {"softcap": 2.0},
        {"sliding_window": 20, "softcap": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_and_soft_caps_are_those_of_the_formula(options: dict[str, object], dtype: torch.dtype) -> None:
    attention = Attention((2, 3, 12), dtype, **options)
    text, cache = attention.states(2, 90), attention.new_cache()
    outputs = [attention.forward((cache, text[start : start + 9]))[0] for start in range(0, 90, 9)]
    assert_close(torch.cat(outputs), text.attended())


def test_sinks_take_their_share_and_give_nothing() -> None:
    attention = Attention((2, 2, 8), torch.float32, sinks=torch.tensor([-1.0, 0.0, 2.0, 9.0]))
    text = attention.states(3, 40)
    assert_close(attention.forward((attention.new_cache(), text))[0], text.attended())


def test_very_large_and_very_small_scores_do_no_harm() -> None:
    attention = Attention((1, 1, 8), torch.float32)
    text = attention.states(4, 30)
    text.query.mul_(200)
    output = attention.forward((attention.new_cache(), text))[0]
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), text.attended(), rtol=1e-4, atol=1e-4)  # scores of 1,000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 21}], ids=str)
def test_a_row_has_the_same_bits_alone_in_chunks_beside_others_and_in_other_blocks(
    shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, object]
) -> None:
    attention = Attention(shape, dtype, **options)
    text, other = attention.states(5, 120), attention.states(6, 70)
    expected = attention.forward((attention.new_cache(), text))[0]
    generator = random.Random(7)
    for _ in range(4):
        cache, others = attention.new_cache(), [attention.new_cache() for _ in range(generator.randrange(3))]
        attention.new_cache().reserve(16 * generator.randrange(3))  # later blocks lie elsewhere
        outputs = []
        while cache.length < 120:
            start, end = cache.length, min(120, cache.length + generator.choice((1, 1, 2, 5, 33)))
            beside = [(c, other[c.length : c.length + generator.choice((1, 4))]) for c in others if c.length < 60]
            place = generator.randrange(len(beside) + 1)
            parts = [*beside[:place], (cache, text[start:end]), *beside[place:]]
            outputs.append(attention.forward(*parts)[place])
            if generator.random() < 0.3:  # a draft that is not accepted
                attention.forward((cache, other[:5]))
                cache.rollback(end)
        assert torch.equal(torch.cat(outputs), expected)
        for used in (cache, *others):
            used.free()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", [0, 3, 15, 16, 61])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=str)
def test_a_path_of_a_tree_has_the_bits_of_a_chain_before_and_after_it_is_kept(
    base: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    attention = Attention((2, 3, 20), dtype, **options)
    prefix, nodes, after = attention.states(1, base), attention.states(2, len(TREE_PARENTS)), attention.states(3, 4)
    tree_cache, chain_cache, other = (attention.new_cache() for _ in range(3))
    if base:
        attention.forward((tree_cache, prefix), (chain_cache, prefix))
    tree = attention.forward((other, after), (tree_cache, nodes, TREE_PARENTS))[1]
    chain = attention.forward((chain_cache, nodes[list(TREE_LEAF_PATH)]))[0]
    assert torch.equal(tree[list(TREE_LEAF_PATH)], chain)
    tree_cache.compact(base, TREE_LEAF_PATH)
    assert torch.equal(attention.forward((tree_cache, after))[0], attention.forward((chain_cache, after))[0])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_share_the_work_and_change_no_bit(num_threads: int) -> None:
    attention = Attention((3, 3, 16), torch.float32)
    text = attention.states(1, 100)
    expected = attention.forward((attention.new_cache(), text))[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        cache = attention.new_cache()
        outputs = [attention.forward((cache, text[:3]))[0], attention.forward((cache, text[3:]))[0]]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(outputs), expected)


def test_an_adopted_prefix_is_read_as_if_it_had_been_computed() -> None:
    attention = Attention((2, 2, 8), torch.bfloat16)
    token_ids, text = list(range(60)), attention.states(1, 60)
    first, second = attention.new_cache(), attention.new_cache()
    expected = attention.forward((first, text))[0]
    first.publish(token_ids)
    length = second.adopt_prefix(token_ids)
    assert length == 48
    assert torch.equal(attention.forward((second, text[length:]))[0], expected[length:])


def test_bfloat16_is_rounded_to_nearest_even_and_keeps_nan() -> None:
    attention = Attention((1, 1, 8), torch.bfloat16)
    text = attention.states(1, 2)
    text.value[0] = torch.tensor([1.0, -2.5, 3.0, 0.0, 1e30, -1e-30, 7.0, 0.5])
    text.value[1] = text.value[0]  # equal values: their mean is exact
    output = attention.forward((attention.new_cache(), text))[0]
    assert torch.equal(output[:, 0], text.value[:, 0])
    text.value[1, 0, 3] = float("nan")
    output = attention.forward((attention.new_cache(), text))[0]
    assert output[1].isnan().flatten().tolist() == [i == 3 for i in range(8)]
    assert not output[0].isnan().any()


def test_the_plan_says_where_rows_read_and_write() -> None:
    attention = Attention((1, 1, 8), torch.float32)
    chain, tree = attention.new_cache(), attention.new_cache()
    for cache, length in ((chain, 15), (tree, 2)):
        cache.reserve(20)
        cache.extend(length)
    plan: AttentionPlan = plan_attention([SessionRows(chain, 2), SessionRows(tree, 3, (-1, 0, 0))], 6)
    blocks = np.array([*chain.block_table, *tree.block_table])
    assert plan.positions.tolist() == [15, 16, 2, 3, 3, 0]
    assert plan.num_keys.tolist() == [16, 17, 3, 4, 4, 0]
    assert plan.num_direct_keys.tolist() == [16, 17, 2, 2, 2, 0]
    assert plan.ancestor_slots[2:5].tolist() == [[2, 0], [2, 3], [2, 4]]
    assert plan.sessions.tolist() == [0, 0, 1, 1, 1, 0]
    assert plan.first_rows.tolist() == [0, 2, 5]
    expected = [blocks[0] * 16 + 15, blocks[1] * 16, *(blocks[2] * 16 + slot for slot in (2, 3, 4)), -1]
    assert plan.write_slots.tolist() == expected


def test_a_parent_comes_before_its_child() -> None:
    refuse_bad_tree(3, (-1, 0, -1))
    for parents in ((-1, 1), (-1, -2), (0, 0), (-1,)):
        with pytest.raises(ValueError, match="parent"):
            refuse_bad_tree(2, parents)


def test_a_device_without_a_kernel_is_refused() -> None:
    layout = CacheLayout(1, 1, 8, torch.float32, torch.device("meta"), 64)
    with pytest.raises(ModelLoadError, match="meta"):
        paged_attention(KVStorage(layout, 1), 1)
