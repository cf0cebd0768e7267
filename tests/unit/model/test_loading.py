from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.errors import ModelLoadError
from specdec.model.loading import load_model
from specdec.model.runner import Rows
from tests.unit.model.tiny import make_tiny_model_dir
from tests.unit.model.tiny_gguf import write_tiny_gguf


def test_a_folder_becomes_a_runner_a_tokenizer_and_their_description(tiny_model_dir: Path) -> None:
    loaded = load_model(str(tiny_model_dir), device="cpu")
    assert loaded.info.name == str(tiny_model_dir)
    assert loaded.tokenizer.vocabulary_size == 320
    assert loaded.info.vocabulary_size == loaded.runner.vocabulary_size == 328  # padding rows are the model's alone
    assert loaded.info.context_limit == 512
    assert loaded.info.tokenizer_fingerprint == loaded.tokenizer.fingerprint
    assert loaded.info.numerics == loaded.runner.numerics


def test_the_loaded_model_gives_the_logits_of_the_folder(tiny_model_dir: Path) -> None:
    loaded = load_model(str(tiny_model_dir), device="cpu", dtype="float32")
    token_ids = loaded.tokenizer.encode_prompt("the cat sat")
    (logits,) = loaded.runner.forward([Rows(loaded.runner.new_cache(), token_ids)])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)  # float32 kernels sum in another order


def test_equal_weights_have_equal_numerics_wherever_they_lie(tmp_path: Path) -> None:
    fingerprints = [
        load_model(str(make_tiny_model_dir(tmp_path / name, seed=seed)), device="cpu").info.numerics
        for name, seed in (("here", 0), ("there", 0), ("other", 1))
    ]
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0] != fingerprints[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_that_of_the_weights(tiny_model_dir: Path, dtype: str) -> None:
    numerics = load_model(str(tiny_model_dir), device="cpu", dtype=dtype).info.numerics  # type: ignore[arg-type]
    assert numerics is not None
    assert numerics.weights_dtype == dtype


def test_a_quantised_draft_has_numerics_of_its_own(tiny_model_dir: Path) -> None:
    plain = load_model(str(tiny_model_dir), device="cpu").info
    quantised = load_model(str(tiny_model_dir), device="cpu", quantization="int8").info
    assert quantised.numerics != plain.numerics
    assert quantised.tokenizer_fingerprint == plain.tokenizer_fingerprint


def test_a_gguf_file_runs(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(tmp_path / "tiny.gguf"), device="cpu", cache_dir=tmp_path / "cache")
    (logits,) = loaded.runner.forward([Rows(loaded.runner.new_cache(), [5, 6, 7], logits_from=2)])
    assert logits.shape == (1, 320)


def test_weights_that_are_missing_are_refused_rather_than_random(tmp_path: Path) -> None:
    folder = make_tiny_model_dir(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="up_proj"):
        load_model(str(folder), device="cpu")


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model_dir(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(folder), device="cpu")


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model_dir(tmp_path / "model", vocabulary_size=300)
    other = make_tiny_model_dir(tmp_path / "other", vocabulary_size=320)
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(ModelLoadError, match="320 ids"):
        load_model(str(folder), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match="CUDA"):
        load_model(str(tiny_model_dir), device="cuda")
