"""Architectures of transformers as they are: their own ids, and the same bits for a row however it came to run."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from specdec.errors import ModelLoadError
from specdec.model.kv_cache import KVCache
from specdec.model.runner import ModelRunner, Rows
from specdec.model.self_check import run_self_check
from tests.unit.model.tiny import Architecture, tiny_model

VOCABULARY_SIZE = 320
ARCHITECTURES: list[Architecture] = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "mixtral", "qwen2_moe", "qwen3_moe",
    "gpt_oss",
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # the last is `auto` on a processor without bfloat16


def tiny(architecture: Architecture) -> PreTrainedModel:
    # Layers enough for both kinds of attention where a model has two (one in six of Gemma 3 is full).
    layers = {"gemma2": 4, "gemma3": 7}.get(architecture, 2)
    return tiny_model(architecture, vocabulary_size=VOCABULARY_SIZE, layers=layers, eos_token_id=None)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY_SIZE) for _ in range(count)]


def feed(runner: ModelRunner, cache: KVCache, token_ids: Sequence[int], chunk: int) -> Tensor:
    """Logits of every row, the tokens given in chunks."""
    chunks = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return torch.cat([runner.forward([Rows(cache, ids)])[0] for ids in chunks])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_is_that_of_generate(architecture: Architecture) -> None:
    prompt = random_tokens(30)  # longer than a sliding window
    model = tiny(architecture)
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=44, min_new_tokens=44, do_sample=False)
    runner = ModelRunner.from_hf_model(model, dtype=torch.float32)
    cache = runner.new_cache()
    logits = runner.forward([Rows(cache, prompt)])[0]
    output = list(prompt)
    while len(output) < len(prompt) + 44:
        output.append(int(logits[-1].argmax()))
        logits = runner.forward([Rows(cache, output[-1:])])[0]
    assert output == expected[0].tolist()
    assert len(set(output[30:])) > 5  # not one token again and again


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def runner(request: pytest.FixtureRequest, dtype: torch.dtype) -> ModelRunner:
    runner = ModelRunner.from_hf_model(tiny(request.param), dtype=dtype)
    check = run_self_check(runner)
    assert check.passed, check.detail
    return runner


def test_bits_depend_on_neither_chunks_nor_neighbours_nor_drafts(runner: ModelRunner) -> None:
    text, others = random_tokens(70), [random_tokens(40, seed=seed) for seed in (2, 3, 4)]
    expected = feed(runner, runner.new_cache(), text, 16)
    for chunk in (1, 7, 48):
        assert torch.equal(feed(runner, runner.new_cache(), text, chunk), expected), f"chunks of {chunk}"

    caches, rows, own = [runner.new_cache() for _ in others], [], runner.new_cache()
    for start in range(0, 70, 10):
        batch = [
            Rows(cache, other[cache.length :][: 3 + i])
            for i, (cache, other) in enumerate(zip(caches, others, strict=True))
        ]
        batch = [entry for entry in batch if entry.token_ids]
        batch.insert(len(batch) // 2, Rows(own, text[start : start + 10]))
        logits = runner.forward(batch)
        rows.append(logits[next(i for i, entry in enumerate(batch) if entry.cache is own)])
    assert torch.equal(torch.cat(rows), expected), "beside others"

    own.rollback(50)
    runner.forward([Rows(own, random_tokens(6, seed=9))])  # a draft that is not accepted
    own.rollback(50)
    assert torch.equal(feed(runner, own, text[50:], 6), expected[50:]), "after a draft"


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))


def recurrent_gemma() -> PreTrainedModel:
    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2)
    )


def bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1))


def headless() -> PreTrainedModel:
    return LlamaModel(tiny_model().config)


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


def deepseek_v2() -> PreTrainedModel:
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
            first_k_dense_replace=1, max_position_embeddings=64,
        )
    )  # fmt: skip


def gemma3n() -> PreTrainedModel:
    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
            laurel_rank=8, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0], layer_types=["full_attention"],
        )
    )  # fmt: skip


def longrope() -> PreTrainedModel:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors, "factor": 2.0,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    return tiny_model(rope_parameters=rope)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (gpt2, "outside linear"),
        (mamba, "cannot be rolled back"),
        (recurrent_gemma, "cannot be rolled back"),
        (bart, "encoder-decoder"),
        (headless, "output layer"),
        (longrope, "longest session"),
        (bloom, "how many positions"),
        (deepseek_v2, "cosines and sines"),
        (gemma3n, "cap their logits"),
    ],
)
def test_models_that_could_not_be_exact_or_rolled_back_are_refused_with_the_reason(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelLoadError, match=reason):
        ModelRunner.from_hf_model(make().eval(), dtype=torch.float32)
