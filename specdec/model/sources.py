"""From a model's name to a folder of safetensors: a named model, a .gguf file, a local folder or a hub id.

Knows where weights come from and what is refused before anything is read: pickled weights, code beside the weights,
architectures that transformers does not have. Refuses to know how weights are run.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.errors import ModelLoadError
from specdec.model.cache import build_once, cache_root
from specdec.model.catalog import NAMED_MODELS, NamedModel
from specdec.model.download import fetch_gguf
from specdec.model.gguf import dequantise

_CACHE_LAYOUT = "dequantised-v1"  # a new number where `dequantise` writes other bytes
_DIGEST_FILE = "weights.sha256"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A checked Hugging Face folder. `recorded_digest` is that of its weights, where this program made them."""

    path: Path
    recorded_digest: str | None = None

    def weights_digest(self) -> str:
        """SHA-256 of the safetensors files in the order of their names; about a second per gigabyte unless recorded."""
        return self.recorded_digest or _digest_of_files(sorted(self.path.glob("*.safetensors")))


def find_model(name: str, cache_dir: Path | None = None) -> ModelFolder:
    """Raises ModelLoadError where nothing has that name, or it cannot be fetched, or it must not be loaded."""
    path = Path(name).expanduser()
    if named := NAMED_MODELS.get(name):
        return _named(named, cache_root(cache_dir))
    if path.suffix == ".gguf":
        return _gguf(path, cache_root(cache_dir))
    if name and path.is_dir():
        return _checked(path)
    if _HUB_ID.fullmatch(name):
        return _checked(_from_hub(name))
    raise ModelLoadError(
        f"no model {name!r}: give a local folder, a .gguf file, a hub id (owner/name) or one of "
        f"{', '.join(NAMED_MODELS)}"
    )


def _named(model: NamedModel, root: Path) -> ModelFolder:
    def build(folder: Path) -> None:
        downloads = root / "downloads" / model.name
        _dequantise_and_record(fetch_gguf(model, downloads), folder)
        shutil.rmtree(downloads)

    return _cached(root, f"{model.name}-{model.sha256[:12]}", build)


def _gguf(path: Path, root: Path) -> ModelFolder:
    if not path.is_file():
        raise ModelLoadError(f"there is no file {path}")
    path = path.resolve()
    status = path.stat()
    identity = f"{path}\n{status.st_size}\n{status.st_mtime_ns}"  # hashing the content would cost as much as loading
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return _cached(root, f"{path.stem}-{key}", lambda folder: _dequantise_and_record(path, folder))


def _dequantise_and_record(gguf: Path, folder: Path) -> None:
    dequantise(gguf, folder)
    digest = _digest_of_files(sorted(folder.glob("*.safetensors")))
    (folder / _DIGEST_FILE).write_text(f"{digest}\n", encoding="ascii")


def _cached(root: Path, entry: str, build: Callable[[Path], None]) -> ModelFolder:
    folder = build_once(root / _CACHE_LAYOUT / entry, build)
    try:
        digest = (folder / _DIGEST_FILE).read_text(encoding="ascii").strip()
        return dataclasses.replace(_checked(folder), recorded_digest=digest)
    except (OSError, ModelLoadError) as error:
        raise ModelLoadError(
            f"the cached model {folder} is damaged ({error}): remove that folder and start again"
        ) from error


def _from_hub(repo_id: str) -> Path:
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo_id} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"the hub has no model {repo_id}, or it is private and you are not logged in") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"the hub cannot be reached and its cache here does not have {repo_id}: connect, set HF_HOME to a cache "
            f"that has it, or give a local folder, a .gguf file or one of {', '.join(NAMED_MODELS)}"
        ) from error


def _checked(folder: Path) -> ModelFolder:
    """Refuses, by name and config alone, what must not or cannot be loaded."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelLoadError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if "auto_map" in config or "auto_map" in (_read_json(folder / "tokenizer_config.json") or {}):
        raise ModelLoadError(f"{folder} wants to run code of its own (auto_map), which specdec never does")
    if "quantization_config" in config:
        raise ModelLoadError(f"{folder} holds quantised weights; give the unquantised model, or a .gguf file")
    _refuse_unknown_architecture(folder, config)
    names = os.listdir(folder)
    if not any(name.endswith(".safetensors") for name in names):
        pickled = sorted(name for name in names if name.endswith(_PICKLED_SUFFIXES))
        why = f"only {pickled[0]}, and pickled weights can run code: convert them" if pickled else "no weights"
        raise ModelLoadError(f"{folder} has {why}; safetensors are needed")
    return ModelFolder(folder)


def _refuse_unknown_architecture(folder: Path, config: dict[str, Any]) -> None:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    known_names = [] if known is None else [known] if isinstance(known, str) else list(known)
    if not known_names or (architectures is not None and architectures not in [[name] for name in known_names]):
        raise ModelLoadError(
            f"{folder} is of an architecture that is no known causal language model: {architectures or model_type}"
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return content


def _digest_of_files(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
