"""The Triton attention: right beside float64, and the same bits for a row whatever runs beside it."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.unit.model.triton_on_a_cpu import DEVICE  # before any kernel is imported

# isort: split

from specdec.model.attention_plan import SessionRows, plan_attention
from specdec.model.block_pool import BlockPool
from specdec.model.cpu_attention import CpuPagedAttention
from specdec.model.cuda.paged_attention import CudaPagedAttention, programs_per_row, split_size
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.paged_attention import AttentionOptions, PagedAttention

CONTEXT = 600  # three splits
MAX_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    query_heads: int = 6
    kv_heads: int = 2
    head_size: int = 20
    dtype: torch.dtype = torch.float32

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(1, self.kv_heads, self.head_size, self.dtype, DEVICE, CONTEXT)


class Session:
    """A sequence whose queries, keys and values are decided by its seed, so that any part of it can be run anywhere."""

    def __init__(self, bench: "Bench", seed: int, length: int = CONTEXT) -> None:
        shape, generator = bench.shape, torch.Generator().manual_seed(seed)
        self.cache: KVCache = bench.new_cache()
        self.query = torch.randn(length, shape.query_heads, shape.head_size, generator=generator).to(
            DEVICE, shape.dtype
        )
        self.key, self.value = (
            torch.randn(length, shape.kv_heads, shape.head_size, generator=generator).to(DEVICE, shape.dtype)
            for _ in range(2)
        )


class Bench:
    """A storage full of NaN, and attention over it."""

    def __init__(self, shape: Shape, options: AttentionOptions | None = None, *, on_cpu: bool = False) -> None:
        self.shape = shape
        self.options = options or AttentionOptions(scaling=shape.head_size**-0.5)
        self.pool = BlockPool(160)
        self.storage = KVStorage(shape.layout, 160)
        for tensor in (*self.storage.keys, *self.storage.values):
            tensor.fill_(float("nan"))
        self.attention: PagedAttention = (
            CpuPagedAttention(self.storage) if on_cpu else CudaPagedAttention(self.storage, MAX_ROWS)
        )

    def new_cache(self) -> KVCache:
        return KVCache(self.pool, self.storage)

    def fill(self, session: Session, length: int) -> Session:
        """Puts the first keys and values in their slots, as if their rows had run, which takes an interpreter long."""
        session.cache.reserve(length)
        for position in range(length):
            block, place = session.cache.block_table[position // 16], position % 16
            self.storage.keys[0][block, :, place] = session.key[position]
            self.storage.values[0][block, :, place] = session.value[position]
        session.cache.extend(length)
        return session

    def run(
        self, parts: Sequence[tuple[Session, Sequence[int], Sequence[int] | None]], num_padding: int = 0
    ) -> list[Tensor]:
        """Runs, per session, the rows at these indices of its sequence, as a chain or a tree. Returns their outputs."""
        counts = [len(indices) for _, indices, _ in parts]
        for session, indices, _ in parts:
            session.cache.reserve(session.cache.length + len(indices))
        plan = plan_attention(
            [SessionRows(session.cache, len(indices), parents) for session, indices, parents in parts],
            sum(counts) + num_padding,
        )
        query, key, value = (
            torch.cat([getattr(session, name)[list(indices)] for session, indices, _ in parts])
            for name in ("query", "key", "value")
        )
        query, key, value = (
            torch.cat([rows, torch.full_like(rows[:1], 7.0).expand(num_padding, -1, -1)])
            for rows in (query, key, value)
        )
        # As modelling code has them: heads before rows.
        query, key, value = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (query, key, value))
        output = torch.full(query.shape, float("nan"), dtype=query.dtype, device=DEVICE)
        self.attention.attend(0, query, key, value, output, plan, self.options)
        assert not output[sum(counts) :].any()
        for session, indices, _ in parts:
            session.cache.extend(len(indices))
        return list(torch.split(output[: sum(counts)], counts))


def run_chain(bench: Bench, seed: int, start: int, end: int, chunk: int = MAX_ROWS) -> Tensor:
    """Outputs of the rows [start, end) of the sequence of this seed, in chunks."""
    session = bench.fill(Session(bench, seed), start)
    parts = [range(first, min(first + chunk, end)) for first in range(start, end, chunk)]
    return torch.cat([bench.run([(session, part, None)])[0] for part in parts])


def exact(session: Session, position: int, options: AttentionOptions) -> Tensor:
    """[Hq, D] float64, from the formula."""
    group = session.query.shape[1] // session.key.shape[1]
    first = max(0, position + 1 - (options.sliding_window or CONTEXT))
    keys, values = (
        rows[first : position + 1].double().repeat_interleave(group, dim=1) for rows in (session.key, session.value)
    )
    scores = torch.einsum("hd,jhd->hj", session.query[position].double(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.double()[:, None]], dim=1)
    weights = scores.softmax(dim=1)[:, : len(keys)]
    return torch.einsum("hj,jhd->hd", weights, values)


SHAPES = [
    Shape(),
    Shape(query_heads=4, kv_heads=4, head_size=64),
    Shape(query_heads=4, kv_heads=1, head_size=16, dtype=torch.float16),
    Shape(query_heads=6, kv_heads=2, head_size=48, dtype=torch.bfloat16),
    Shape(query_heads=2, kv_heads=1, head_size=256),
]
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_the_formula(shape: Shape) -> None:
    bench = Bench(shape)
    session = Session(bench, seed=1)
    for part in (range(1), range(1, 3), range(62, 65)):
        bench.fill(session, part.start)
        outputs = bench.run([(session, part, None)])[0]
        for output, position in zip(outputs, part, strict=True):
            expected = exact(session, position, bench.options)
            torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCES[shape.dtype])
        session.cache.rollback(0)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.2, sliding_window=40),
        AttentionOptions(0.2, softcap=1.5),
        AttentionOptions(0.2, sinks=torch.linspace(-2, 2, 6, device=DEVICE)),
        AttentionOptions(0.2, 300, 2.0, torch.linspace(-2, 2, 6, device=DEVICE)),
    ],
    ids=["window", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("position", [20, 330, 590])
def test_options_mean_what_they_say(options: AttentionOptions, position: int) -> None:
    bench = Bench(Shape(), options)
    session = bench.fill(Session(bench, seed=2), position)
    output = bench.run([(session, [position], None)])[0][0]
    torch.testing.assert_close(output.double(), exact(session, position, options), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_agrees_with_the_attention_of_a_cpu(dtype: torch.dtype) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("both must read one storage's values")
    shape = dataclasses.replace(Shape(), dtype=dtype)
    outputs, expected = (run_chain(Bench(shape, on_cpu=on_cpu), 3, 250, 259) for on_cpu in (False, True))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_of_any_size_give_the_same_bits(chunk: int) -> None:
    bench = Bench(Shape())
    assert torch.equal(run_chain(bench, 4, 251, 260, chunk), run_chain(bench, 4, 251, 260))


def test_a_row_has_the_same_bits_alone_and_in_a_random_batch_across_a_split() -> None:
    bench, generator = Bench(Shape()), random.Random(5)
    expected = run_chain(bench, 5, 253, 263)
    watched = bench.fill(Session(bench, seed=5), 253)
    others = [bench.fill(Session(bench, seed), length) for seed, length in ((6, 0), (7, 40))]
    while watched.cache.length < 263:
        start = watched.cache.length
        part = range(start, min(263, start + generator.randint(1, 4)))
        parts: list[tuple[Session, Sequence[int], None]] = [(watched, part, None)]
        for other in others:
            first = other.cache.length
            parts.insert(generator.randint(0, 1), (other, range(first, first + generator.randint(1, 2)), None))
        place = next(i for i, (session, _, _) in enumerate(parts) if session is watched)
        outputs = bench.run(parts, num_padding=generator.randint(0, 3))[place]
        assert torch.equal(outputs, expected[part.start - 253 : part.stop - 253])


def test_a_path_of_a_tree_has_the_bits_of_a_chain_and_can_be_kept() -> None:
    bench = Bench(Shape(), AttentionOptions(0.2, sliding_window=70))
    base = 252  # the tree crosses from one split to the next
    chain = run_chain(bench, 8, base, base + 8)
    session, before, after = bench.fill(Session(bench, 8), base), Session(bench, 9), Session(bench, 10)
    path, wrong = [0, 2, 3, 5, 6, 7, 8], [base + 100, base + 101]
    rows = [base, wrong[0], base + 1, base + 2, wrong[1], *range(base + 3, base + 7)]
    parents = [-1, 0, 0, 2, 2, 3, 5, 6, 7]
    outputs = bench.run([(before, range(3), None), (session, rows, parents), (after, range(2), [-1, -1])])[1]
    assert torch.equal(outputs[path], chain[:7])
    session.cache.compact(base, path)
    assert torch.equal(bench.run([(session, [base + 7], None)])[0], chain[7:])


def test_how_many_programs_share_a_row_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for enough in (1, 7, 1024):
        monkeypatch.setattr("specdec.model.cuda.paged_attention._ENOUGH_PROGRAMS", enough)
        outputs.append(run_chain(Bench(Shape()), 11, 590, 593))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_splits_follow_from_the_model_and_programs_from_the_batch() -> None:
    assert [split_size(limit) for limit in (64, 8192, 32_768, 131_072, 40_000)] == [256, 256, 1024, 4096, 1280]
    assert [programs_per_row(rows, 32) for rows in (2, 32, 64, 512, 4096)] == [32, 32, 16, 2, 1]


def test_rows_of_padding_write_nothing() -> None:
    bench = Bench(Shape())
    session = Session(bench, seed=12)
    bench.run([(session, range(3), None)], num_padding=5)
    written = bench.storage.keys[0].isfinite().all(dim=-1).all(dim=1)  # [blocks, 16]
    assert written.sum() == 3
