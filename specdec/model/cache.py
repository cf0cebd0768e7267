"""The cache folder: each entry is complete or absent, whoever crashes and however many start at once.

Knows folders, locks and renames; refuses to know models.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from specdec.errors import ModelLoadError

LOCK_TIMEOUT_S = 3600.0

log = logging.getLogger(__name__)


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir` where given, else $SPECDEC_CACHE, else ~/.cache/specdec."""
    if cache_dir is not None:
        return cache_dir.expanduser()
    from_environment = os.environ.get("SPECDEC_CACHE")
    return Path(from_environment).expanduser() if from_environment else Path.home() / ".cache" / "specdec"


def build_once(entry: Path, build: Callable[[Path], None], *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Path:
    """Returns the folder `entry`; where it is absent, `build` fills an empty folder that then takes its name.

    One process builds at a time; what a crashed one left is removed. An entry that is there is returned without a lock,
    so that a cache may be read-only.

    Raises ModelLoadError where another process still builds after `lock_timeout_s`; what `build` raises passes through.
    """
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = entry.with_name(f"{entry.name}.partial")
    with _locked(entry, lock_timeout_s):
        if not entry.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                _sync(partial)
                partial.rename(entry)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            _sync_folder(entry.parent)
    return entry


@contextlib.contextmanager
def _locked(entry: Path, timeout_s: float) -> Iterator[None]:
    """The system drops the lock when its holder dies; the file stays."""
    lock = FileLock(entry.with_name(f"{entry.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that prepares %s", entry.name)
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            message = f"another process has been preparing {entry} for more than {timeout_s:.0f} s; is it stuck?"
            raise ModelLoadError(message) from None
    try:
        yield
    finally:
        lock.release()


def _sync(folder: Path) -> None:
    """A rename may reach the disk before what it names: files first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
