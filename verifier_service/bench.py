"""What the engine costs beside the model: `specdec bench-engine`. Engine and plain forwards take turns in one process.

Knows how to measure and which figures come of it; refuses to know how they are shown.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from specdec.messages import Commit
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.interface import Runner
from specdec.model.kv_cache import KVCache
from specdec.model.loading import LoadedModel, load_model
from specdec.model.runner import ModelRunner, Rows
from verifier_service.bench_engine import BenchEngine, BenchSession
from verifier_service.scheduler import PREFILL_SHARE

FORWARD_ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
DRAFT_TOKENS = 4
SHORT_PROMPT_TOKENS = 16
NUM_WARM_UP_STEPS = 3
MAX_STEPS = 100_000


@dataclasses.dataclass(frozen=True)
class EngineBenchOptions:
    """`context` are the tokens of a session's prompt, `long_prompt` those of the prompt that a short one meets."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    session_counts: Sequence[int] = (1, 4, 16)
    context: int = 200
    long_prompt: int = 4000
    num_steps: int = 30
    max_step_rows: int = 64


def measure_engine(options: EngineBenchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """The report. Raises ModelLoadError."""
    say(f"loading {options.model}")
    model = load_model(
        options.model,
        device=options.device,  # type: ignore[arg-type]
        dtype=options.dtype,  # type: ignore[arg-type]
        num_threads=options.num_threads,
    )
    self_check = model.prove()
    report: dict[str, Any] = {
        "numerics": dataclasses.asdict(model.runner.numerics),
        "self_check": {"passed": self_check.passed, "detail": self_check.detail},
        "steps": [],
    }
    for num_sessions in options.session_counts:
        for draft_tokens in (0, DRAFT_TOKENS):
            say(f"{num_sessions} sessions, {draft_tokens} draft tokens")
            report["steps"].append(measure_steps(model, options, num_sessions, draft_tokens))
    say("forwards by rows")
    report["forward_ms_by_rows"] = forward_ms_by_rows(model.runner, options)
    report["cache"] = measure_cache(model, options)
    say("a short request beside a long prompt")
    report["first_token"] = measure_first_token(model, options)
    return report


def measure_steps(
    model: LoadedModel, options: EngineBenchOptions, num_sessions: int, draft_tokens: int
) -> dict[str, Any]:
    """Steps of the engine in turn with the plain forward of as many rows; medians, in milliseconds."""
    runner = model.runner
    prompts = [_tokens(runner, options.context, seed) for seed in range(num_sessions)]
    num_rounds = NUM_WARM_UP_STEPS + options.num_steps
    num_uneven_steps = 2 + num_sessions * BLOCK_SIZE // (options.max_step_rows // PREFILL_SHARE)
    max_new_tokens = (num_rounds + num_uneven_steps) * (1 + draft_tokens)
    told: Sequence[Sequence[int]] = [()] * num_sessions
    if draft_tokens:
        told = _run_to_the_end(BenchEngine(model, options.max_step_rows), prompts, max_new_tokens)
    engine = BenchEngine(model, options.max_step_rows, prefix_caching=True)
    _run_to_the_end(engine, prompts, 1)  # so that all of them begin at once
    for prompt, output in zip(prompts, told, strict=True):
        engine.open(prompt, max_new_tokens, told=output, draft_tokens=draft_tokens)
    _step_until(engine, lambda: all(session.token_ids for session in engine.sessions.values()))
    plain = [_filled(runner, prompt, options.max_step_rows) for prompt in prompts]
    engine.observer.steps.clear()
    plain_times_s: list[float] = []
    while len(engine.observer.steps) < num_rounds and engine.step():
        if len(engine.observer.steps) > len(plain_times_s):
            rows_each = max(1, round(engine.observer.steps[-1].num_rows / num_sessions))
            plain_times_s.append(_plain_forward_s(runner, plain, rows_each))
    steps = engine.observer.steps[NUM_WARM_UP_STEPS:]
    for cache in plain:
        cache.free()
    engine.close()
    step_ms, forward_ms, beside_ms = (
        _median_ms(times_s)
        for times_s in (
            [step.step_time_s for step in steps],
            [step.forward_time_s for step in steps],
            [step.step_time_s - step.forward_time_s for step in steps],
        )
    )
    return {
        "num_sessions": num_sessions,
        "draft_tokens": draft_tokens,
        "num_steps": len(steps),
        "rows_per_step": statistics.fmean(step.num_rows for step in steps),
        "step_ms": step_ms,
        "forward_ms": forward_ms,
        "beside_forward_ms": beside_ms,
        "plain_forward_ms": _median_ms(plain_times_s[NUM_WARM_UP_STEPS:]),
        "share_beside_forward": beside_ms / step_ms,
    }


def forward_ms_by_rows(runner: Runner, options: EngineBenchOptions) -> dict[int, float]:
    """Of one session at `context`, all row counts in turn, logits of every row."""
    cache = _filled(runner, _tokens(runner, options.context, 0), options.max_step_rows)
    counts = [rows for rows in FORWARD_ROWS if options.context + rows <= runner.context_limit]
    times_s: dict[int, list[float]] = {rows: [] for rows in counts}
    for _ in range(1 + options.num_steps // 3):
        for rows in counts:
            times_s[rows].append(_plain_forward_s(runner, [cache], rows))
    cache.free()
    return {rows: _median_ms(times[1:]) for rows, times in times_s.items()}


def measure_cache(model: LoadedModel, options: EngineBenchOptions) -> dict[str, Any]:
    """Bytes of a position: what blocks that a session holds come to, and what the model's shape asks for."""
    runner = model.runner
    num_tokens = options.context // BLOCK_SIZE * BLOCK_SIZE
    cache = _filled(runner, _tokens(runner, num_tokens, 1), options.max_step_rows)
    held_bytes = cache.num_bytes
    cache.free()
    return {
        "kv_bytes_per_token": runner.kv_bytes_per_token,
        "held_bytes_per_token": held_bytes / num_tokens,
        "arithmetic_bytes_per_token": _arithmetic_bytes(runner),
        "kv_budget_bytes": runner.kv_budget_bytes,
    }


def measure_first_token(model: LoadedModel, options: EngineBenchOptions) -> dict[str, Any]:
    """Steps and time from the opening of a short request to its first token, idle and beside a long prompt."""
    runner = model.runner
    num_long = min(options.long_prompt, runner.context_limit - SHORT_PROMPT_TOKENS)
    short = _tokens(runner, SHORT_PROMPT_TOKENS, 2)
    engine = BenchEngine(model, options.max_step_rows)
    idle = _steps_to_first_token(engine, engine.open(short, 2))
    engine.close()
    long_session = engine.open(_tokens(runner, num_long, 3), 2)
    engine.step()
    engine.observer.steps.clear()
    busy = _steps_to_first_token(engine, engine.open(short, 2))
    was_reading = not long_session.token_ids
    rows_meanwhile = [step.num_rows for step in engine.observer.steps]
    engine.close()
    return {
        "short_prompt_tokens": SHORT_PROMPT_TOKENS,
        "long_prompt_tokens": num_long,
        "idle": idle,
        "beside_long_prompt": busy,
        "long_prompt_was_being_read": was_reading,
        "rows_per_step_meanwhile": rows_meanwhile,
    }


def _steps_to_first_token(engine: BenchEngine, session: BenchSession) -> dict[str, float]:
    began, before = time.monotonic(), len(engine.observer.steps)
    _step_until(engine, lambda: any(isinstance(event, Commit) for event in session.events))
    return {"num_steps": len(engine.observer.steps) - before, "time_ms": 1000 * (time.monotonic() - began)}


def _run_to_the_end(engine: BenchEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """What the target alone says."""
    sessions = [engine.open(prompt, max_new_tokens) for prompt in prompts]
    _step_until(engine, lambda: all(session.has_finished for session in sessions))
    engine.close()
    return [session.token_ids for session in sessions]


def _step_until(engine: BenchEngine, done: Callable[[], bool]) -> None:
    for _ in range(MAX_STEPS):
        if done():
            return
        engine.step()
    raise RuntimeError(f"the engine did not get there in {MAX_STEPS} steps")


def _filled(runner: Runner, token_ids: Sequence[int], chunk_tokens: int) -> KVCache:
    cache = runner.new_cache()
    chunk_tokens = min(chunk_tokens, runner.max_rows)
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = token_ids[start : start + chunk_tokens]
        runner.forward_rows([Rows(cache, chunk, logits_from=len(chunk))])
    return cache


def _plain_forward_s(runner: Runner, caches: Sequence[KVCache], rows_each: int) -> float:
    """One forward of so many rows a session, forgotten again."""
    lengths = [cache.length for cache in caches]
    token_ids = _tokens(runner, rows_each, 5)
    began = time.monotonic()
    runner.forward_rows([Rows(cache, token_ids) for cache in caches])
    elapsed_s = time.monotonic() - began
    for cache, length in zip(caches, lengths, strict=True):
        cache.rollback(length)
    return elapsed_s


def _arithmetic_bytes(runner: Runner) -> int | None:
    """Keys and values of every layer in the cache's dtype; None for a model without layers."""
    if not isinstance(runner, ModelRunner):
        return None
    config = runner.model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    item_bytes = 2 if runner.numerics.compute_dtype == "bfloat16" else 4
    return int(2 * config.num_hidden_layers * kv_heads * head_size * item_bytes)


def _tokens(runner: Runner, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [generator.randrange(runner.vocabulary_size // 2) for _ in range(count)]


def _median_ms(times_s: Sequence[float]) -> float:
    return 1000 * statistics.median(times_s)
