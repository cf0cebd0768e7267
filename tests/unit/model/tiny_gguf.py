"""A GGUF file of a tiny Qwen2 model, as llama.cpp's converter writes one: what is dequantised in tests."""

from pathlib import Path

import gguf
from transformers import PreTrainedModel

from tests.unit.model.tiny import CHAT_TEMPLATE, END_TOKEN_ID, SPECIAL_TOKENS, tiny_model, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path, *, scale: float = 1.0, extra_tensor: str | None = None, without: str | None = None
) -> PreTrainedModel:
    """Returns the model whose matrices are in the file as Q8_0 blocks.

    `scale` multiplies the output layer; `extra_tensor` is added, and the tensor named `without` left out.
    """
    model = tiny_model("qwen2")
    model.lm_head.weight.data *= scale
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer)
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        gguf_name = f"{_gguf_stem(stem)}.{kind}"
        if gguf_name == without:
            continue
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name, values)
        else:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, model.model.norm.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_stem(stem: str) -> str:
    if stem in _NAMES:
        return _NAMES[stem]
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}"


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = tiny_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(
        [f"{token[0]} {token[1]}" for token in tokens if token not in SPECIAL_TOKENS and len(token) == 2]
    )
    writer.add_eos_token_id(END_TOKEN_ID)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
