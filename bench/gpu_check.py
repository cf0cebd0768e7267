"""Does this device compute exactly, and how fast? One script for a machine that has just got a GPU.

    python bench/gpu_check.py --json out/gpu.json

Needs no network and no model files: models of random weights, built from their shapes. Named models that are in the
cache already are checked too. Runs on a CPU as well, less of it. Exit code 1 where a check failed.
"""

import argparse
import copy
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_check_attention import check_attention, time_attention
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from specdec.bench.machine import describe_commit, describe_machine
from specdec.bench.report_file import write_report
from specdec.errors import ModelLoadError
from specdec.messages import ModelInfo
from specdec.model.block_pool import OutOfBlocksError
from specdec.model.cache import cache_root
from specdec.model.catalog import NAMED_MODELS
from specdec.model.linear import default_dtype
from specdec.model.loading import LoadedModel
from specdec.model.runner import ModelRunner, Rows
from specdec.model.self_check import run_self_check
from specdec.model.sources import find_model
from specdec.model.synthetic_tokenizer import synthetic_tokenizer
from verifier_service.bench import EngineBenchOptions, measure_steps

TIME_LIMIT_S = 540.0
PROMPT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured: all of it on a GPU, a taste of it on a CPU."""

    sessions: tuple[int, ...]
    rows_each: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    repetitions: int
    engine_steps: int


ON_GPU = Size((1, 4, 16, 64), (1, 2, 5, 8), (200, 4000, 30_000), 128, 5, 60)
ON_CPU = Size((1, 4), (1, 5), (100,), 12, 2, 5)

QWEN_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
TINY = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


def random_model(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Weights of ordinary size, so that logits differ and output does not repeat itself."""
    torch.manual_seed(0)
    config = Qwen2Config(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.04)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def models(device: torch.device) -> Iterator[tuple[str, torch.dtype, Callable[[], PreTrainedModel]]]:
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if device.type == "cuda" else [default_dtype(device)]
    for dtype in dtypes:
        yield "random, tiny", dtype, lambda dtype=dtype: random_model(TINY, dtype, device)  # type: ignore[misc]
    if device.type != "cuda":
        return
    yield "random, shapes of a 1.5B", torch.bfloat16, lambda: random_model(QWEN_1_5B, torch.bfloat16, device)
    for model in NAMED_MODELS.values():
        if (cache_root() / f"{model.name}-{model.sha256[:12]}").is_dir():
            folder = find_model(model.name).path
            yield (
                model.name,
                torch.bfloat16,
                lambda folder=folder: AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                    folder, dtype=torch.bfloat16, local_files_only=True, device_map={"": device}
                ).eval(),
            )


def tokens(count: int, vocabulary_size: int, seed: int) -> list[int]:
    generator = random.Random(seed)  # noqa: S311 - prompts, not secrets
    return [generator.randrange(vocabulary_size) for _ in range(count)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def median_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    return 1000 * statistics.median([elapsed_s(run, device) for _ in range(1 + repetitions)][1:])


def check_recordings(runner: ModelRunner) -> dict[str, Any]:
    """Graphs against the same forwards unrecorded, bit for bit."""
    forward = runner.cuda_forward
    if forward is None:
        return {"skipped": "no CUDA device"}
    shapes, counts = forward.recorded_shapes, runner.body_counts.counts
    results: dict[bool, list[torch.Tensor]] = {}
    for recorded in (True, False):
        if not recorded:
            forward.record(())
        results[recorded] = []
        for rows in counts:
            cache = runner.new_cache()
            given = tokens(min(rows, runner.context_limit), runner.vocabulary_size, rows)
            results[recorded].append(runner.forward_rows([Rows(cache, given)]))
            cache.free()
    forward.record(counts)
    equal = [torch.equal(left, right) for left, right in zip(results[True], results[False], strict=True)]
    wanted = {(rows, rows) for rows in counts}
    return {"passed": all(equal) and wanted <= set(shapes), "recorded_shapes": shapes, "equal_by_rows": equal}


def forward_table(runner: ModelRunner, size: Size) -> list[dict[str, Any]]:
    """Milliseconds of a forward: sessions of one context, some rows each."""
    table = []
    for context in (context for context in size.contexts if context + max(size.rows_each) <= runner.context_limit):
        caches = [runner.new_cache() for _ in range(max(size.sessions))]
        try:
            for cache in caches:
                cache.reserve(context)
                cache.extend(context)
        except OutOfBlocksError:
            for cache in caches[len(caches) // 2 :]:  # leave room for the rows
                cache.free()
            caches = [cache for cache in caches if cache.length == context]
        for num_sessions in (count for count in size.sessions if count <= len(caches)):
            for rows_each in (rows for rows in size.rows_each if rows * num_sessions <= runner.max_rows):
                given = tokens(rows_each, runner.vocabulary_size, 3)

                def run(held: Sequence[Any] = caches[:num_sessions], given: Sequence[int] = given) -> None:
                    runner.forward_rows([Rows(cache, given) for cache in held])
                    for cache in held:
                        cache.rollback(cache.length - len(given))

                try:
                    time_ms = median_ms(run, runner.device, 2 * size.repetitions)
                except OutOfBlocksError:
                    continue
                table.append({"context": context, "sessions": num_sessions, "rows_each": rows_each, "ms": time_ms})
        for cache in caches:
            cache.free()
    return table


@torch.inference_mode()
def target_only(runner: ModelRunner, plain: PreTrainedModel, size: Size) -> dict[str, Any]:
    """Greedy tokens/s of one session, in turn with the unmodified model's own `generate`."""
    prompt = tokens(PROMPT_TOKENS, runner.vocabulary_size, 1)
    given = torch.tensor([prompt], device=runner.device)

    outputs: dict[str, list[int]] = {}

    def ours() -> None:
        cache, output = runner.new_cache(), list(prompt)
        for start in range(0, len(prompt) - 1, runner.max_rows):
            chunk = prompt[start : min(start + runner.max_rows, len(prompt) - 1)]
            runner.forward_rows([Rows(cache, chunk, logits_from=len(chunk))])
        for _ in range(size.new_tokens):
            output.append(int(runner.forward_rows([Rows(cache, output[-1:])])[0].argmax()))
        cache.free()
        outputs["ours"] = output[len(prompt) :]

    def theirs() -> None:
        mask = torch.ones_like(given)
        output = plain.generate(given, attention_mask=mask, max_new_tokens=size.new_tokens, do_sample=False)
        outputs["transformers"] = output[0, len(prompt) :].tolist()

    times_s: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(1 + size.repetitions):
        times_s["ours"].append(elapsed_s(ours, runner.device))
        times_s["transformers"].append(elapsed_s(theirs, runner.device))
    per_s = {name: size.new_tokens / statistics.median(found[1:]) for name, found in times_s.items()}
    pairs = zip(outputs["ours"], outputs["transformers"], strict=False)
    first_difference = next((i for i, (left, right) in enumerate(pairs) if left != right), size.new_tokens)
    return {
        "tokens_per_s": per_s,
        "ratio": per_s["ours"] / per_s["transformers"],
        "equal_tokens_before_a_difference": first_difference,  # their logits round elsewhere
    }


def engine_steps(runner: ModelRunner, size: Size) -> list[dict[str, Any]]:
    """An engine's step beside the forward inside it."""
    tokenizer = synthetic_tokenizer(runner.vocabulary_size)
    info = ModelInfo(
        name="random",
        vocabulary_size=runner.vocabulary_size,
        context_limit=runner.context_limit,
        tokenizer_fingerprint=tokenizer.fingerprint,
        numerics=runner.numerics,
    )
    model = LoadedModel(runner, tokenizer, info)
    options = EngineBenchOptions(info.name, context=PROMPT_TOKENS, num_steps=size.engine_steps)
    return [measure_steps(model, options, sessions, draft) for sessions in size.sessions[:3] for draft in (0, 4)]


def check_model(build: Callable[[], PreTrainedModel], dtype: torch.dtype, size: Size) -> dict[str, Any]:
    plain = build()
    runner = ModelRunner.from_hf_model(copy.deepcopy(plain), dtype=dtype, weights_digest="measured only")
    self_check = run_self_check(runner)
    report: dict[str, Any] = {
        "numerics": dataclasses.asdict(runner.numerics),
        "self_check": dataclasses.asdict(self_check),
        "recordings": check_recordings(runner),
    }
    report["passed"] = self_check.passed and report["recordings"].get("passed", True)
    report["target_only"] = target_only(runner, plain, size)
    del plain
    report["forwards"] = forward_table(runner, size)
    report["engine_steps"] = engine_steps(runner, size)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_check.json"), help="where the report goes")
    arguments = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if arguments.device == "auto" else arguments.device)
    size = ON_GPU if device.type == "cuda" else ON_CPU
    began = time.monotonic()
    report: dict[str, Any] = {
        "commit": describe_commit(Path(__file__).parent),
        "machine": describe_machine() | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"},
        "attention": check_attention(device),
        "attention_ms": time_attention(device),
        "models": [],
    }
    failed = [case["case"] for case in report["attention"] if not case["passed"]]
    for name, dtype, build in models(device):
        title = f"{name}, {str(dtype).removeprefix('torch.')}"
        if time.monotonic() - began > TIME_LIMIT_S:
            print(f"{title}: left out, {TIME_LIMIT_S:.0f} s are over")
            continue
        try:
            result = check_model(build, dtype, size)
        except (ModelLoadError, RuntimeError, OutOfBlocksError) as error:
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        report["models"].append({"model": title} | result)
        if not result["passed"]:
            failed.append(title)
        print(f"{title}: {describe(result)}", flush=True)
    report["elapsed_s"] = time.monotonic() - began
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_report(arguments.json, report)
    print(f"failed: {', '.join(failed)}" if failed else "every check passed", f"({report['elapsed_s']:.0f} s)")
    return 1 if failed else 0


def describe(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    counts = result["self_check"]["safe_row_counts"]
    check, speed = result["self_check"], result["target_only"]["tokens_per_s"]
    beside = max(step["beside_forward_ms"] for step in result["engine_steps"])
    return (
        f"self-check {'passed' if check['passed'] else 'FAILED'} ({check['detail']}); "
        f"{len(counts)} row counts up to {counts[-1]}; {speed['ours']:.1f} tokens/s, "
        f"transformers {speed['transformers']:.1f}; an engine step takes {beside:.2f} ms beside its forward"
    )


if __name__ == "__main__":
    sys.exit(main())
