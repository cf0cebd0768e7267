"""Plain `transformers` as its users call it: `python -m specdec.bench.peer_worker --target NAME [--draft NAME] ...`.

Loads once, then answers one JSON object a line on standard input with one on standard output, until the input ends.
Uses nothing of ours but the way from a model's name to its folder: no kernel, no cache, no decoding.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from specdec.bench.peers import GREEDY, PROMPT_LOOKUP
from specdec.model.sources import find_model

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_PROBE_CONTEXT, _PROBE_FORWARDS = 32, 4
_CLEARLY_FASTER = 0.95  # what a dtype must take of bfloat16's time to be preferred

MODES: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "transformers_assisted": {"assistant": {}},
    "transformers_assisted_4": {"assistant": {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}},
    PROMPT_LOOKUP: {"prompt_lookup_num_tokens": 10},
}
"""What each mode sets beside greedy; `assistant` goes to the draft model's generation config, where it is read."""


class Worker:
    def __init__(self, target_folder: str, draft_folder: str | None, device: str, dtype: str) -> None:
        self._device = _resolve_device(device)
        self._tokenizer = AutoTokenizer.from_pretrained(target_folder)
        if dtype == "auto":
            dtype, forward_ms = _fastest_dtype(target_folder, self._device)
        else:
            forward_ms = {}
        self._target = _load(target_folder, dtype, self._device)
        self._draft = _load(draft_folder, dtype, self._device) if draft_folder is not None else None
        self.settings = {
            "dtype": dtype,
            "device": self._device,
            "num_threads": torch.get_num_threads(),
            "forward_ms": forward_ms,
            "modes": MODES,
        }

    def generate(self, mode: str, prompt: str, max_new_tokens: int) -> dict[str, Any]:
        options = dict(MODES[mode])
        if (assistant_options := options.pop("assistant", None)) is not None:
            if self._draft is None:
                raise ValueError(f"{mode} needs a draft model")
            self._draft.generation_config = _plain_config(self._draft, **assistant_options)
            options["assistant_model"] = self._draft
        prompt_ids = self._encode(prompt)  # [1, prompt]
        attention_mask = torch.ones_like(prompt_ids)
        began = time.monotonic()
        with torch.inference_mode():
            output_ids = self._target.generate(
                prompt_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=max_new_tokens, **options
            )
            token_ids = output_ids[0, prompt_ids.shape[1] :].tolist()  # waits for the device
        elapsed_s = time.monotonic() - began
        return {"token_ids": token_ids, "num_prompt_tokens": prompt_ids.shape[1], "elapsed_s": elapsed_s}

    def top_two(self, prompt: str, output_token_ids: list[int]) -> dict[str, Any]:
        output = torch.tensor([output_token_ids], dtype=torch.long, device=self._device)
        with torch.inference_mode():
            token_ids = torch.cat([self._encode(prompt), output], dim=1)  # [1, prompt + output]
            logits = self._target(token_ids, logits_to_keep=1).logits[0, -1].float()  # [V]
        top = logits.topk(2)
        return {"token_ids": top.indices.tolist(), "logits": top.values.tolist()}

    def _encode(self, prompt: str) -> torch.Tensor:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids: torch.Tensor = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return ids.to(self._device)


def _resolve_device(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _load(folder: str, dtype: str, device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype], use_safetensors=True).to(device).eval()
    model.generation_config = _plain_config(model)
    return model


def _plain_config(model: PreTrainedModel, **options: Any) -> GenerationConfig:
    """A model may bring penalties and sampling of its own; the ends alone are kept."""
    own = model.generation_config
    eos_token_id = own.eos_token_id if own.eos_token_id is not None else model.config.eos_token_id
    pad_token_id = own.pad_token_id
    if pad_token_id is None:  # one prompt at a time: it pads nothing, its absence is warned of at each call
        pad_token_id = eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id
    return GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=eos_token_id, pad_token_id=pad_token_id, **options
    )


def _fastest_dtype(folder: str, device: str) -> tuple[str, dict[str, dict[str, float]]]:
    """Greedy decoding is one-row forwards: the dtype whose are fastest, bfloat16 unless another is clearly faster.

    The times of 8 rows are measured too, since modes that verify several tokens depend on them.
    """
    forward_ms = {}
    for dtype in _DTYPES:
        model = _load(folder, dtype, device)
        forward_ms[dtype] = {str(rows): _forward_ms(model, rows) for rows in (1, 8)}
        del model
    best = min(forward_ms, key=lambda dtype: forward_ms[dtype]["1"])
    clearly = forward_ms[best]["1"] < _CLEARLY_FASTER * forward_ms["bfloat16"]["1"]
    return (best if clearly else "bfloat16"), forward_ms


def _forward_ms(model: PreTrainedModel, num_rows: int) -> float:
    """Median time of a forward of so many new positions after a short context."""
    times_ms = []
    with torch.inference_mode():
        cache = model(torch.ones((1, _PROBE_CONTEXT), dtype=torch.long, device=model.device)).past_key_values
        rows = torch.ones((1, num_rows), dtype=torch.long, device=model.device)
        for _ in range(_PROBE_FORWARDS):
            began = time.monotonic()
            model(rows, past_key_values=cache).logits[0, -1, 0].item()  # waits for the device
            times_ms.append(1000 * (time.monotonic() - began))
    return sorted(times_ms[1:])[len(times_ms[1:]) // 2]


def serve(worker: Worker, questions: TextIO, answers: TextIO) -> None:
    """Until the questions end. A question that fails is answered with its error, and ends nothing."""
    actions: dict[str, Callable[..., dict[str, Any]]] = {"generate": worker.generate, "top_two": worker.top_two}
    for line in questions:
        question = json.loads(line)
        try:
            answer = actions[question.pop("do")](**question)
        except Exception as error:  # of a program that is not ours: told to the benchmark, which decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", *_DTYPES])
    options = parser.parse_args()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints stays out of the answers
        target_folder = str(find_model(options.target).path)
        draft_folder = str(find_model(options.draft).path) if options.draft is not None else None
        worker = Worker(target_folder, draft_folder, options.device, options.dtype)
        print(json.dumps(worker.settings), file=answers, flush=True)
        serve(worker, sys.stdin, answers)


if __name__ == "__main__":
    main()
