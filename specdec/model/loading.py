"""From a model's name to a model that runs: weights, tokenizer and their description.

Knows devices and dtypes; refuses to know sessions. Start-up only: everything that can be wrong with a model is a
ModelLoadError here.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.messages import ModelInfo, SelfCheck
from specdec.model.interface import Runner
from specdec.model.linear import Quantization, default_dtype
from specdec.model.progress import silence_transformers, step_progress
from specdec.model.runner import ModelRunner
from specdec.model.self_check import run_self_check
from specdec.model.sources import find_model
from specdec.model.synthetic import SyntheticRunner, check_synthetic
from specdec.model.synthetic_options import is_synthetic, parse_synthetic
from specdec.model.synthetic_tokenizer import synthetic_tokenizer
from specdec.model.tokenizer import TextTokenizer

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    runner: Runner
    tokenizer: TextTokenizer
    info: ModelInfo

    def prove(self) -> SelfCheck:
        """Sets up what the device can do exactly and proves it, as each kind of model needs it. Takes seconds."""
        if isinstance(self.runner, ModelRunner):
            return run_self_check(self.runner)
        if isinstance(self.runner, SyntheticRunner):
            return check_synthetic(self.runner)
        raise TypeError(f"nobody knows how to prove a {type(self.runner).__name__}")


def load_model(
    name: str,
    *,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    quantization: Quantization = "none",
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    kv_budget_bytes: int | None = None,
) -> LoadedModel:
    """Loads a named model, a .gguf file, a local folder or a hub id; the first two are dequantised once into the cache.
    Or makes up a synthetic one, which has no weights: device, dtype and quantization say nothing of it.

    Args:
        device: `auto` is CUDA where present.
        dtype: of the weights; `auto` is the fastest whose kernel is exact on the device.
        quantization: rounds the weights of linear layers at load: for drafts, which need speed and no bits.
        num_threads: of one forward pass, for the whole process; torch's own choice by default.
        kv_budget_bytes: for keys and values of all sessions; a share of the free memory by default.

    Raises ModelLoadError.
    """
    silence_transformers()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if is_synthetic(name):
        return _make_synthetic(name, kv_budget_bytes)
    torch_device = _device(device)
    try:
        folder = find_model(name, cache_dir)
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be prepared: {error}") from error
    weights_dtype = default_dtype(torch_device) if dtype == "auto" else getattr(torch, dtype)
    with step_progress(f"loading {name}"), ThreadPoolExecutor(1, "weights-digest") as hashing:
        digest = hashing.submit(folder.weights_digest)
        tokenizer = TextTokenizer.from_folder(folder.path)
        stored_or_wanted = "auto" if quantization != "none" and dtype == "auto" else weights_dtype
        model = _load_weights(folder.path, stored_or_wanted, torch_device)
        if tokenizer.vocabulary_size > model.config.vocab_size:
            raise ModelLoadError(
                f"the tokenizer of {name} has {tokenizer.vocabulary_size} ids, its model {model.config.vocab_size}"
            )
        runner = ModelRunner.from_hf_model(
            model,
            dtype=model.dtype,
            quantization=quantization,
            weights_digest=digest.result(),
            kv_budget_bytes=kv_budget_bytes,
        )
    return _described(name, runner, tokenizer)


def _make_synthetic(name: str, kv_budget_bytes: int | None) -> LoadedModel:
    options = parse_synthetic(name)
    runner = SyntheticRunner(options, kv_budget_bytes=kv_budget_bytes)
    return _described(name, runner, synthetic_tokenizer(options.vocabulary_size))


def _described(name: str, runner: Runner, tokenizer: TextTokenizer) -> LoadedModel:
    info = ModelInfo(
        name=name,
        vocabulary_size=runner.vocabulary_size,
        context_limit=runner.context_limit,
        tokenizer_fingerprint=tokenizer.fingerprint,
        numerics=runner.numerics,
    )
    return LoadedModel(runner, tokenizer, info)


def _device(name: DeviceName) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("this machine, or this build of torch, has no CUDA device")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name if name != "auto" else "cpu")


def _load_weights(folder: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **placement,
        )
    except Exception as error:  # transformers, safetensors and torch raise what they like on broken files
        raise ModelLoadError(f"the weights in {folder} cannot be loaded: {error}") from error
    if lost := [*report["missing_keys"], *report["mismatched_keys"]]:  # transformers would leave these at random
        raise ModelLoadError(f"{folder} lacks weights that its architecture has, {lost[0]} for one")
    return model
