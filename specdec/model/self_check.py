"""Proves, on the device at hand, that a row's logits depend on its token prefix alone.

First finds the row counts on which the real linear layers give a row the same bits in every place; then compares whole
forwards of the real model. Knows only the runner; raises nothing: a device without the guarantee is told, not refused.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.messages import SelfCheck
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.kv_cache import KVCache
from specdec.model.linear import RowLinear
from specdec.model.row_counts import split_rows
from specdec.model.runner import ModelRunner, Rows

_HEAD_CANDIDATES = frozenset((1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18, 24, 32, 48, 64))
_PLACES = (0, 1, 5)
_FAR_POSITION = 316
_EXTRA_TIME_S = 1.5  # chunk sizes beyond the first few proofs are tried within this


@dataclasses.dataclass
class _Comparisons:
    num_comparisons: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def compare(self, name: str, logits: Tensor, expected: Tensor) -> None:
        """Both [rows, V]: equal to the bit, or a failure that says how many rows differ."""
        self.num_comparisons += logits.shape[0]
        num_different = int((logits != expected).any(dim=1).sum())
        if num_different:
            self.failures.append(f"{name}: {num_different} of {logits.shape[0]} rows differ")


def run_self_check(runner: ModelRunner) -> SelfCheck:
    """Sets the runner's row counts and proves them. Takes seconds on a large model, and leaves no session behind."""
    started = time.monotonic()
    comparisons = _Comparisons()
    try:
        with torch.inference_mode():
            _find_row_counts(runner)
            for counts in _choices(runner):
                runner.use_row_counts(counts)
                comparisons = _Comparisons(comparisons.num_comparisons)
                _prove(runner, comparisons)
                if not comparisons.failures:
                    break
    except Exception as error:
        # Whatever the device cannot do is a finding here; the server decides what to make of it.
        comparisons.failures.append(f"{type(error).__name__}: {error}")
    passed = not comparisons.failures
    return SelfCheck(
        passed=passed,
        max_rows=runner.body_counts.largest,
        safe_row_counts=runner.body_counts.counts,
        num_comparisons=comparisons.num_comparisons,
        detail=f"{comparisons.num_comparisons} rows bitwise equal" if passed else "; ".join(comparisons.failures),
        elapsed_s=time.monotonic() - started,
    )


def _choices(runner: ModelRunner) -> list[Sequence[int]]:
    """The counts that the layers found exact; on CUDA then one count alone, which gives all other kernels one shape."""
    found = runner.body_counts.counts
    alone = [count for count in runner.kernel.reference_rows if count in found and len(found) > 1]
    return [found, *([count] for count in alone if runner.device.type == "cuda")]


def _find_row_counts(runner: ModelRunner) -> None:
    """One layer of each shape stands for all of that shape; the large output layer is tried on fewer counts."""
    kernel = runner.kernel
    head = runner.model.get_output_embeddings()
    body: dict[tuple[int, int], RowLinear] = {}
    for module in runner.model.modules():
        if isinstance(module, RowLinear) and module is not head:
            body.setdefault((module.in_features, module.out_features), module)
    dtype, device = kernel.compute_dtype, runner.device
    head_candidates = _HEAD_CANDIDATES if device.type == "cpu" else frozenset(kernel.candidate_rows)
    head_candidates |= set(kernel.reference_rows)
    for counts, layers, candidates, places in (
        (runner.body_counts, list(body.values()), set(kernel.candidate_rows), _PLACES),
        (runner.head_counts, [head], head_candidates, _PLACES[-1:]),
    ):
        allowed = sorted(candidates & set(kernel.candidate_rows))
        safe = safe_row_counts(layers, allowed, kernel.reference_rows, places, dtype, device)
        counts.use(range(1, safe[-1] + 1) if kernel.exact_between and safe == allowed else safe)


def safe_row_counts(
    layers: Sequence[RowLinear],
    candidates: Sequence[int],
    references: Sequence[int],
    places: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[int]:
    """The counts that give a row the bits it has among `reference` rows, wherever it stands.

    The first of `references` that agrees with itself after moving its rows counts; one row at a time always does.
    """
    probes = [_random_rows(2 * candidates[-1], layer.in_features, dtype, device) for layer in layers]
    for reference in references:
        expected = [_in_blocks(layer.multiply, x, reference) for layer, x in zip(layers, probes, strict=True)]

        def agrees(count: int, expected: Sequence[Tensor] = expected) -> bool:
            return all(
                torch.equal(layer.multiply(x[place : place + count]), rows[place : place + count])
                for layer, x, rows in zip(layers, probes, expected, strict=True)
                for place in places
            )

        safe = [count for count in candidates if agrees(count)]
        if reference in safe:
            return safe
    return [1]


def _prove(runner: ModelRunner, comparisons: _Comparisons) -> None:
    generator = random.Random(7)  # noqa: S311 - a fixed probe, not a secret
    num_tokens = min(30, runner.max_rows, runner.context_limit - 2)
    token_ids, other_ids = ([generator.randrange(runner.vocabulary_size) for _ in range(num_tokens)] for _ in range(2))
    with _new_cache(runner) as cache, _new_cache(runner) as other:
        _prove_near_the_start(runner, comparisons, cache, other, token_ids, other_ids)
    with _new_cache(runner) as cache:
        _prove_far_into_a_context(runner, comparisons, cache, token_ids[:8])
    with _new_cache(runner) as cache:
        _prove_chunks(runner, comparisons, cache, token_ids)


@contextlib.contextmanager
def _new_cache(runner: ModelRunner) -> Iterator[KVCache]:
    cache = runner.new_cache()
    try:
        yield cache
    finally:
        cache.free()


def _prove_near_the_start(
    runner: ModelRunner,
    comparisons: _Comparisons,
    cache: KVCache,
    other: KVCache,
    token_ids: Sequence[int],
    other_ids: Sequence[int],
) -> None:
    num_tokens = len(token_ids)
    expected = runner.forward([Rows(cache, token_ids)])[0]  # [num_tokens, V]

    def chain(name: str, start: int, end: int) -> None:
        cache.rollback(start)
        comparisons.compare(name, runner.forward([Rows(cache, token_ids[start:end])])[0], expected[start:end])

    middle = num_tokens // 2
    for position in range(middle, middle + 4):
        chain("one row at a time", position, position + 1)
    chain("a draft after a rollback", middle - 1, middle + 4)

    cache.rollback(middle)
    other_logits, logits = runner.forward([Rows(other, other_ids[:3]), Rows(cache, token_ids[middle : middle + 4])])
    comparisons.compare("beside another session", logits, expected[middle : middle + 4])
    other.rollback(0)
    alone = runner.forward([Rows(other, other_ids[:3])])[0]
    comparisons.compare("another session alone", alone, other_logits)

    cache.rollback(middle)
    wrong = (token_ids[middle + 1] + 1) % runner.vocabulary_size
    tree_ids = [token_ids[middle], wrong, *token_ids[middle + 1 : middle + 4], wrong]
    tree = runner.forward([Rows(cache, tree_ids, parent_rows=(-1, 0, 0, 2, 3, 2))])[0]
    path = [0, 2, 3, 4]
    comparisons.compare("a path of a tree", tree[path], expected[middle : middle + 4])
    cache.compact(middle, path)
    end = middle + len(path)
    logits = runner.forward([Rows(cache, token_ids[end : end + 1])])[0]
    comparisons.compare("after a compacted tree", logits, expected[end : end + 1])


def _prove_chunks(runner: ModelRunner, comparisons: _Comparisons, cache: KVCache, token_ids: Sequence[int]) -> None:
    started = time.monotonic()
    expected = runner.forward([Rows(cache, token_ids)])[0]
    for chunk in (2, 3, 5, 7, 8, 13):
        for start in range(0, len(token_ids), chunk):
            if time.monotonic() - started > _EXTRA_TIME_S:
                return
            cache.rollback(start)
            end = min(start + chunk, len(token_ids))
            logits = runner.forward([Rows(cache, token_ids[start:end])])[0]
            comparisons.compare(f"chunks of {chunk}", logits, expected[start:end])


def _prove_far_into_a_context(
    runner: ModelRunner, comparisons: _Comparisons, cache: KVCache, token_ids: Sequence[int]
) -> None:
    """Across a border of 64 keys, where attention kernels may sum in other blocks. Made-up keys are a long prompt's."""
    room = runner.pool.num_free_blocks * BLOCK_SIZE
    base = min(_FAR_POSITION, runner.context_limit - len(token_ids), room - len(token_ids))
    cache.reserve(base)
    blocks = list(cache.block_table)
    for layer in (*runner.storage.keys, *runner.storage.values):  # [blocks, H, 16, D]
        _, heads, block_size, head_size = layer.shape
        num_rows = len(blocks) * heads * block_size
        layer[blocks] = _random_rows(num_rows, head_size, layer.dtype, layer.device).view(-1, *layer.shape[1:])
    cache.extend(base)
    expected = runner.forward([Rows(cache, token_ids)])[0]
    for start, end in ((0, 3), (3, 4), (4, 8)):
        cache.rollback(base + start)
        logits = runner.forward([Rows(cache, token_ids[start:end])])[0]
        comparisons.compare("far into a context", logits, expected[start:end])


def _random_rows(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(features)
    return torch.randn(rows, features, generator=generator).to(dtype=dtype, device=device)


def _in_blocks(multiply: Callable[[Tensor], Tensor], x: Tensor, block_rows: int) -> Tensor:
    return torch.cat([multiply(block) for block in split_rows(x, block_rows)])
