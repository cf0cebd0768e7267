"""Tiny models with random weights, and folders that load like any Hugging Face model: what tests use for weights.

The weights are drawn wider than a trained initialisation, so that greedy output is varied and not one repeated token.
The same seed gives the same weights; `perturbation` gives a model that mostly, not always, agrees with its base.
"""

import itertools
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Architecture = Literal[
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"
]
_WINDOW = 16
_GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": _WINDOW, "tie_word_embeddings": False}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_CLASSES: dict[Architecture, tuple[type[PreTrainedConfig], Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": _WINDOW}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**_GEMMA, "final_logit_softcapping": 20.0}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA),
    "phi": (PhiConfig, PhiForCausalLM, {"partial_rotary_factor": 0.5}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {**_EXPERTS, "shared_expert_intermediate_size": 80}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gpt_oss": (
        GptOssConfig, GptOssForCausalLM,
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": _WINDOW},
    ),
}  # fmt: skip

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN_ID = 2  # <|im_end|>
SMALLEST_VOCABULARY_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(vocabulary_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE: three special tokens, 256 bytes, and merges of frequent letter pairs up to `vocabulary_size`."""
    if vocabulary_size < SMALLEST_VOCABULARY_SIZE:
        raise ValueError(f"a byte-level vocabulary has at least {SMALLEST_VOCABULARY_SIZE} tokens")
    vocabulary = list(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocabulary_size - len(vocabulary)
    merges = list(
        itertools.islice(itertools.product("Ġetaoinshrdlucmfwypvbgkjqxz", "etaoinshrdlucmfwypvbgkjqxz"), num_merges)
    )
    if len(merges) < num_merges:
        raise ValueError(f"no more than {len(vocabulary) + len(merges)} tokens can be made of letter pairs")
    vocabulary += ["".join(pair) for pair in merges]
    bpe = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(vocabulary)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    architecture: Architecture = "llama",
    *,
    vocabulary_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context_limit: int = 512,
    tie_word_embeddings: bool = False,
    seed: int = 0,
    perturbation: float = 0.0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A float32 model with random weights. `perturbation` is the relative size of noise added to every weight."""
    config_class, model_class, needed = _CLASSES[architecture]
    options: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context_limit,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
        "pad_token_id": 0,
    }
    config = config_class(**{**options, **needed, **config_overrides})
    model: PreTrainedModel = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and not name.endswith("bias") and not architecture.startswith("gemma"):
            parameter.data = 1.0 + 0.1 * noise  # Gemma's norms scale by 1 + weight
        elif parameter.dim() == 1:
            parameter.data = 0.1 * noise
        elif "embed" in name:  # Gemma scales it at run time
            parameter.data = noise / hidden_size**0.5 if architecture.startswith("gemma") else noise
        else:
            parameter.data = noise * (1.5 / parameter.shape[-1] ** 0.5)
        if perturbation:
            other = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + 1))
            parameter.data += perturbation * parameter.data.std() * other
    model.tie_weights()
    return model


def make_tiny_model_dir(
    path: Path,
    architecture: Architecture = "llama",
    *,
    vocabulary_size: int = 320,
    num_padding_rows: int = 0,
    dtype: torch.dtype = torch.float32,
    **model_options: Any,
) -> Path:
    """Writes a folder that `from_pretrained` loads (config, safetensors, fast tokenizer with a chat template).

    `num_padding_rows` are logit rows beyond the tokenizer's vocabulary, as real models have. `model_options` are those
    of `tiny_model`: hidden_size, layers, heads, kv_heads, context_limit, tie_word_embeddings, seed, perturbation.
    """
    path.mkdir(parents=True, exist_ok=True)
    model = tiny_model(architecture, vocabulary_size=vocabulary_size + num_padding_rows, **model_options)
    model.to(dtype).save_pretrained(path)
    tiny_tokenizer(vocabulary_size).save_pretrained(path)
    return path
