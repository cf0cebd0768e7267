from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.model.tiny import make_tiny_model_dir, tiny_model


def test_the_tiny_folder_loads_as_any_model_and_tokenizer_do(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "Größe 12, naïve 🙂 text"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.config.vocab_size == len(tokenizer) + 8
    assert tokenizer.chat_template


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not() -> None:
    first, second, other = tiny_model(seed=3), tiny_model(seed=3), tiny_model(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_folder_of_tied_half_precision_weights_loads(tmp_path: Path) -> None:
    folder = make_tiny_model_dir(tmp_path, "qwen2", tie_word_embeddings=True, dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
