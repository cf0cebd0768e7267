import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specdec.errors import ModelLoadError
from specdec.model import sources
from specdec.model.catalog import NAMED_MODELS
from specdec.model.sources import find_model
from tests.unit.model.tiny import make_tiny_model_dir
from tests.unit.model.tiny_gguf import write_tiny_gguf


def change_config(folder: Path, file_name: str = "config.json", **changes: Any) -> None:
    path = folder / file_name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model_dir(tmp_path / "model")


def test_a_local_folder_is_taken_as_it_is(folder: Path) -> None:
    assert find_model(str(folder)).path == folder


def test_the_weights_digest_follows_the_weights_alone(folder: Path, tmp_path: Path) -> None:
    digest = find_model(str(folder)).weights_digest()
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert find_model(str(make_tiny_model_dir(tmp_path / "same"))).weights_digest() == digest
    assert find_model(str(make_tiny_model_dir(tmp_path / "other", seed=1))).weights_digest() != digest


def test_a_gguf_file_is_dequantised_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first = find_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(sources, "dequantise", None)
        assert find_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache") == first
    write_tiny_gguf(tmp_path / "tiny.gguf", scale=2.0)
    second = find_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert second.path != first.path
    assert second.weights_digest() != first.weights_digest()


def test_a_named_model_is_fetched_once_and_its_download_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(model: Any, downloads: Path) -> Path:
        fetched.append(model.name)
        downloads.mkdir(parents=True)
        write_tiny_gguf(downloads / "tiny.gguf")
        return downloads / "tiny.gguf"

    monkeypatch.setattr(sources, "fetch_gguf", fetch)
    first, second = (find_model("smollm2-135m", tmp_path) for _ in range(2))
    assert fetched == ["smollm2-135m"]
    assert first == second
    assert first.recorded_digest == sources.ModelFolder(first.path).weights_digest()
    assert not list((tmp_path / "downloads").iterdir())


def test_a_damaged_cache_entry_says_which_folder_to_remove(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    entry = find_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache").path
    (entry / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=f"{re.escape(str(entry))} is damaged.*remove that folder"):
        find_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")


def test_a_hub_id_fetches_safetensors_tokenizer_and_config_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_model("owner/some-model").path == folder
    assert asked["repo_id"] == "owner/some-model"
    assert not any(re.search(r"\.(bin|pt|pth|py)$|^\*$", pattern) for pattern in asked["allow_patterns"])


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=r"cannot be reached.*HF_HOME.*smollm2-135m"):
        find_model("owner/some-model")


@pytest.mark.parametrize("name", ["nothing-of-that-name", "", "/no/such/folder", "a/b/c", "../none"])
def test_a_name_that_is_nothing_lists_what_could_be_given(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no model .*qwen-coder-1\.5b"):
        find_model(name)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no file"):
        find_model(str(tmp_path / "none.gguf"), tmp_path)


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(folder: Path, pickled: str) -> None:
    (folder / "model.safetensors").rename(folder / pickled)
    with pytest.raises(ModelLoadError, match=f"only {pickled}.*pickled"):
        find_model(str(folder))


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        find_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        find_model(str(folder))


@pytest.mark.parametrize("file_name", ["config.json", "tokenizer_config.json"])
def test_code_beside_the_weights_is_refused(folder: Path, file_name: str) -> None:
    change_config(folder, file_name, auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ModelLoadError, match="auto_map"):
        find_model(str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model", "architectures": ["NoSuchModel"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": ["llama"]},
        {"architectures": "LlamaForCausalLM"},
    ],
)
def test_an_unknown_architecture_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelLoadError, match="architecture"):
        find_model(str(folder))


def test_weights_quantised_by_another_scheme_are_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelLoadError, match="quantised"):
        find_model(str(folder))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        find_model(str(folder))


def test_every_named_model_pins_versions_and_a_hash() -> None:
    for model in NAMED_MODELS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.requirement) for part in model.parts)
