"""The device's attention kernel alone: against float64, against itself in other company, and by the clock."""

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.model.attention_plan import AttentionOptions, AttentionPlan, SessionRows, plan_attention
from specdec.model.block_pool import BlockPool
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.paged_attention import paged_attention

MAX_ROWS = 256
LENGTHS = (0, 1, 15, 16, 63, 64, 200, 1023, 1500, 3000)
ERROR_LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    query_heads: int = 12
    kv_heads: int = 2
    head_size: int = 128
    sliding_window: int | None = None
    softcap: float | None = None


CASES = (
    Case("1.5B, bfloat16", torch.bfloat16),
    Case("1.5B, float16", torch.float16),
    Case("1.5B, float32", torch.float32),
    Case("8B, bfloat16", torch.bfloat16, 32, 8),
    Case("one head each, float32", torch.float32, 4, 4, 64),
    Case("window, bfloat16", torch.bfloat16, 8, 2, 80, 512),
    Case("softcap and window, float32", torch.float32, 8, 4, 256, 700, 30.0),
)


class Bench:
    """Sessions of LENGTHS keys in a storage full of NaN, scattered over its blocks."""

    def __init__(self, case: Case, device: torch.device, lengths: tuple[int, ...], context: int) -> None:
        torch.manual_seed(1)
        self.case, self.device = case, device
        layout = CacheLayout(1, case.kv_heads, case.head_size, case.dtype, device, context)
        num_blocks = sum(-(-(length + MAX_ROWS) // 16) for length in lengths) + 8
        self.pool, self.storage = BlockPool(num_blocks), KVStorage(layout, num_blocks)
        self.attention = paged_attention(self.storage, MAX_ROWS)
        self.options = AttentionOptions(case.head_size**-0.5, case.sliding_window, case.softcap)
        for tensor in (*self.storage.keys, *self.storage.values):
            tensor.fill_(float("nan"))
        self.caches = [KVCache(self.pool, self.storage) for _ in lengths]
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.reserve(length)
            cache.extend(length)
            for tensor in (self.storage.keys[0], self.storage.values[0]):
                blocks, places = self._slots(cache, length)
                tensor[blocks, :, places] = self._random(length, case.kv_heads)

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.case.query_heads, self.case.kv_heads, self.case.kv_heads)
        query, key, value = (self._random(num_rows, count) for count in heads)
        return query, key, value

    def plan(self, caches: list[KVCache], padding: int = 0) -> AttentionPlan:
        """One row for each cache, in the slot after its last; counted as part of none."""
        for cache in caches:
            cache.reserve(cache.length + 1)
        return plan_attention([SessionRows(cache, 1) for cache in caches], len(caches) + padding)

    def attend(self, plan: AttentionPlan, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        num_rows = len(states[0])
        padding = len(plan.num_keys) - num_rows
        padded = [torch.cat([rows, rows[:1].expand(padding, -1, -1)]) for rows in states]
        output = torch.empty(padded[0].shape, dtype=self.case.dtype, device=self.device)
        self.attention.attend(0, padded[0], padded[1], padded[2], output, plan, self.options)
        return output[:num_rows]

    def exact(self, cache: KVCache, query: Tensor) -> Tensor:
        """[Hq, D] float64 from the formula, over what the storage holds."""
        blocks, places = self._slots(cache, cache.length + 1)
        group = self.case.query_heads // self.case.kv_heads
        start = max(0, cache.length + 1 - (self.case.sliding_window or cache.length + 1))
        keys, values = (
            tensor[blocks, :, places][start:].double().repeat_interleave(group, dim=1)
            for tensor in (self.storage.keys[0], self.storage.values[0])
        )
        scores = torch.einsum("hd,jhd->hj", query.double(), keys) * self.options.scaling
        if self.options.softcap is not None:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        return torch.einsum("hj,jhd->hd", scores.softmax(dim=1), values)

    def _slots(self, cache: KVCache, length: int) -> tuple[Tensor, Tensor]:
        slots = torch.from_numpy(cache.slot_places(0, length)).to(self.device)
        return slots // 16, slots % 16

    def _random(self, num_rows: int, heads: int) -> Tensor:
        return torch.randn(num_rows, heads, self.case.head_size, device=self.device).to(self.case.dtype)


@torch.inference_mode()
def check_attention(device: torch.device) -> list[dict[str, Any]]:
    found = []
    for case in CASES:
        if device.type == "cpu" and case.dtype == torch.float16:
            continue  # no cache has it there
        bench = Bench(case, device, LENGTHS, context=4096)
        states = bench.rows(len(LENGTHS))
        together = bench.attend(bench.plan(bench.caches, padding=6), states)
        error = max(
            float((output.double() - bench.exact(cache, query)).abs().max())
            for cache, output, query in zip(bench.caches, together, states[0], strict=True)
        )
        num_different = 0
        for row, cache in enumerate(bench.caches):
            own = (states[0][row : row + 1], states[1][row : row + 1], states[2][row : row + 1])
            num_different += not torch.equal(bench.attend(bench.plan([cache]), own)[0], together[row])
        found.append(
            {
                "case": f"attention, {case.name}",
                "passed": error <= ERROR_LIMITS[case.dtype] and num_different == 0,
                "largest_error": error,
                "rows_that_differ_alone": num_different,
            }
        )
        print(f"attention, {case.name}: error {error:.2g}, {num_different} rows differ alone", flush=True)
    return found


@torch.inference_mode()
def time_attention(device: torch.device) -> list[dict[str, Any]]:
    """One layer of the 1.5B in bfloat16: milliseconds, and the bytes of keys and values that it reads in that time."""
    on_gpu = device.type == "cuda"
    table = []
    sizes = ((1, 200), (1, 30_000), (16, 4000), (64, 4000), (256, 1000)) if on_gpu else ((1, 200), (8, 500))
    for num_rows, length in sizes:
        bench = Bench(CASES[0], device, (length,) * num_rows, context=32_768)
        plan, states = bench.plan(bench.caches), bench.rows(num_rows)
        times_s = []
        for _ in range(12):
            began = time.perf_counter()
            for _ in range(10):
                bench.attend(plan, states)
            if on_gpu:
                torch.cuda.synchronize(device)
            times_s.append((time.perf_counter() - began) / 10)
        time_s = statistics.median(times_s[2:])
        num_bytes = num_rows * length * 2 * CASES[0].kv_heads * CASES[0].head_size * 2
        table.append({"rows": num_rows, "keys": length, "ms": 1000 * time_s, "gb_per_s": num_bytes / time_s / 1e9})
    return table
