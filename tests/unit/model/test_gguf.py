from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.errors import ModelLoadError
from specdec.model.gguf import dequantise
from specdec.model.tokenizer import TextTokenizer
from specdec.params import ChatMessage
from tests.unit.model.tiny import END_TOKEN_ID, tiny_tokenizer
from tests.unit.model.tiny_gguf import write_tiny_gguf


def test_a_gguf_file_becomes_a_folder_of_dense_float16_weights(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    dequantise(tmp_path / "tiny.gguf", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    assert model.dtype == torch.float16
    assert not hasattr(model.config, "quantization_config")
    parameters = dict(model.named_parameters())
    for name, parameter in source.named_parameters():
        step = parameter.abs().max() / 127  # Q8_0 rounds to this at most
        assert (parameters[name].float() - parameter).abs().max() <= step, name


def test_its_tokenizer_template_and_end_tokens_come_along(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    dequantise(tmp_path / "tiny.gguf", folder)
    tokenizer = TextTokenizer.from_folder(folder)
    assert tokenizer.fingerprint == TextTokenizer(tiny_tokenizer()).fingerprint
    assert tokenizer.end_token_ids == {END_TOKEN_ID, 0}  # <|im_end|> by the file, <|endoftext|> by its name
    turns = (ChatMessage("user", "the cat"),)
    assert tokenizer.encode_prompt(turns) == TextTokenizer(tiny_tokenizer()).encode_prompt(turns)


def test_weights_beyond_float16_are_kept_as_bfloat16(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "large.gguf", scale=1e6)
    folder = tmp_path / "folder"
    folder.mkdir()
    dequantise(tmp_path / "large.gguf", folder)
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    weights = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert torch.isfinite(weights).all()
    assert weights.abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize(
    ("file_name", "options", "reason"),
    [
        ("rope.gguf", {"extra_tensor": "rope_freqs.weight"}, "rotary"),
        ("holes.gguf", {"without": "blk.1.ffn_up.weight"}, "does not hold the weights"),
        ("tiny-00001-of-00002.gguf", {}, "merge"),
    ],
)
def test_a_file_that_would_load_with_other_weights_than_its_own_is_refused(
    tmp_path: Path, file_name: str, options: dict[str, str], reason: str
) -> None:
    write_tiny_gguf(tmp_path / file_name, **options)
    with pytest.raises(ModelLoadError, match=reason):
        dequantise(tmp_path / file_name, tmp_path)


def test_a_file_that_is_no_gguf_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    for name, broken in (("text", b"not a model"), ("empty", b""), ("cut", content[: len(content) // 2])):
        (tmp_path / f"{name}.gguf").write_bytes(broken)
        with pytest.raises(ModelLoadError, match=name):
            dequantise(tmp_path / f"{name}.gguf", tmp_path)
