"""GGUF files, dequantised once into a Hugging Face folder: safetensors, config, fast tokenizer.

Knows transformers' GGUF loader and what it leaves out; refuses to know where files come from. Loading such a file takes
10 to 100 times as long as loading the folder that is made of it.

The folder holds float16 where every weight fits its range. A GGUF block is a float16 scale times small integers, so
float16's 11 bits keep more of it than bfloat16's 8, and rounding on to bfloat16 at load gives what rounding the
original would, but for ties. Weights beyond 65504, and files that were written in bfloat16, are kept as bfloat16.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.utils.quantization_config import GgufConfig

from specdec.errors import ModelLoadError
from specdec.model.progress import silence_transformers, step_progress

_MOSTLY_BFLOAT16 = 32  # of general.file_type
_UNREAD_ROPE_FACTORS = re.compile(r"rope_(freqs|factors_\w+)\.weight")
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
"""Ends of a turn or of a text, by name: a GGUF file names one end token, the models' own configs name all."""


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes the model in a GGUF file to `folder`, which exists and is empty.

    Raises ModelLoadError for a file that is broken, split, of an unknown architecture, or has tensors that the loader
    would lose.
    """
    silence_transformers()
    metadata = _read_metadata(gguf)
    # The loader draws bars of its own even where transformers' are switched off.
    with step_progress(f"dequantising {gguf.name}"), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = _load(gguf, _storage_dtype(metadata))
            if not _is_finite(model):
                model = _load(gguf, torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        except ModelLoadError:
            raise
        except Exception as error:  # transformers and gguf raise what they like on broken files
            raise ModelLoadError(f"{gguf} cannot be dequantised: {error}") from error
        model.generation_config.eos_token_id = _end_token_ids(tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read_metadata(gguf: Path) -> dict[str, Any]:
    if _SPLIT_FILE.search(gguf.name):
        raise ModelLoadError(f"{gguf} is one of several files: merge them first (llama-gguf-split --merge)")
    try:
        metadata, tensor_names = read_gguf_metadata(str(gguf))
    except Exception as error:
        raise ModelLoadError(f"{gguf} is not a readable GGUF file: {error}") from error
    if any(_UNREAD_ROPE_FACTORS.fullmatch(name) for name in tensor_names):
        raise ModelLoadError(
            f"{gguf} scales its rotary positions by a tensor that would be lost; use the hub id or a folder"
        )
    return dict(metadata)


def _storage_dtype(metadata: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if metadata.get("general.file_type") == _MOSTLY_BFLOAT16 else torch.float16


def _load(gguf: Path, dtype: torch.dtype) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),  # the default may keep blocks packed
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if lost := [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]:
        raise ModelLoadError(f"{gguf} does not hold the weights its architecture has, {lost[0]} for one")
    model.hf_quantizer = None  # either keeps save_pretrained from writing dense weights
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _is_finite(model: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def _end_token_ids(tokenizer: Any) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary[token] for token in _END_TOKENS if token in vocabulary]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*own, *named]))
