"""A kernel on disk is never used once any source that it is made of says something else."""

import errno
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import carray
from numba.core.caching import IndexDataCacheFile

from specdec import kernel_cache, openmp


def write_module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    module = ModuleType(f"specdec.{name}")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return path


def test_a_kernel_is_kept_apart_for_every_text_of_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_module(monkeypatch, tmp_path, "made_up_kernel", "from specdec import made_up_steps\nimport json\n")
    write_module(monkeypatch, tmp_path, "made_up_steps", "from specdec.made_up_constants import SIZE\n")
    constants = write_module(monkeypatch, tmp_path, "made_up_constants", "SIZE = 1\n")
    other = write_module(monkeypatch, tmp_path, "made_up_other", "")

    def kernel() -> None: ...

    kernel.__module__ = "specdec.made_up_kernel"
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

    def folder() -> str:
        with kernel_cache.kept_by_content(kernel) as can_be_kept:
            assert can_be_kept
            return str(kernel_cache.config.CACHE_DIR)

    first = folder()
    other.write_text("changed = True\n")
    assert folder() == first
    constants.write_text("SIZE = 2\n")
    assert folder() != first
    assert Path(folder()).is_relative_to(tmp_path / "cache" / "kernels")


def test_a_kernel_is_compiled_for_this_process_alone_where_its_lock_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    with kernel_cache.kept_by_content(write_module) as can_be_kept:
        assert can_be_kept
    [lock] = tmp_path.rglob("*.lock")
    lock.unlink()
    lock.mkdir()
    with kernel_cache.kept_by_content(write_module) as can_be_kept:
        assert not can_be_kept


def test_a_kernel_is_compiled_for_this_process_alone_where_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with kernel_cache.kept_by_content(write_module) as can_be_kept:
        assert not can_be_kept


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full from the moment that the folder of kernels is there."""

    def no_space(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_save_index", no_space)
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", no_space)


@pytest.mark.usefixtures("full_disk")
def test_a_function_is_compiled_for_this_process_alone_where_the_disk_is_full():
    @kernel_cache.kept()
    def twice(number: int) -> int:
        return 2 * number

    assert twice(21) == 42


@pytest.mark.usefixtures("full_disk")
def test_a_kernel_is_compiled_for_this_process_alone_where_the_disk_is_full():
    record = np.dtype([("number", np.int64)], align=True)

    @openmp.kernel(record)
    def double(arguments: Any) -> None:
        carray(arguments, 1)[0].number *= 2

    job = np.full(1, 21, dtype=np.int64).view(record)
    openmp.run(double, job, alone=True)
    assert job["number"] == [42]


def test_every_function_that_is_kept_is_kept_by_content():
    """numba's own folder beside the sources may not be writable, and then it refuses to compile at all."""
    sources = Path(kernel_cache.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "cache=True" in path.read_text()] == []


def test_a_kernel_is_compiled_for_this_process_alone_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "a file"))
    with kernel_cache.kept_by_content(write_module) as can_be_kept:
        assert not can_be_kept
