import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from specdec.errors import ModelLoadError
from specdec.model.cache import build_once, cache_root


def write_entry(folder: Path) -> None:
    (folder / "weights").write_text("whole")


def build_and_count(entry: Path, counter: Path) -> None:
    def build(folder: Path) -> None:
        with counter.open("a") as file:
            file.write("built\n")
        write_entry(folder)

    build_once(entry, build)


def build_half_and_die(entry: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    build_once(entry, build)


def test_an_entry_is_built_once_and_then_taken_as_it_is(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    for _ in range(2):
        build_and_count(tmp_path / "cache" / "entry", counter)
    assert counter.read_text() == "built\n"
    assert (tmp_path / "cache" / "entry" / "weights").read_text() == "whole"


def test_many_that_start_at_once_build_one_entry(tmp_path: Path) -> None:
    entry, counter = tmp_path / "entry", tmp_path / "counter"
    threads = [threading.Thread(target=build_and_count, args=(entry, counter)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert counter.read_text() == "built\n"


def test_a_process_killed_while_it_builds_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    process = multiprocessing.get_context("fork").Process(target=build_half_and_die, args=(entry,))
    process.start()
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    assert not entry.exists()
    assert [path.name for path in build_once(entry, write_entry, lock_timeout_s=5).iterdir()] == ["weights"]


def test_a_build_that_fails_leaves_no_entry_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ModelLoadError("no network")

    with pytest.raises(ModelLoadError, match="no network"):
        build_once(tmp_path / "entry", fail)
    assert not (tmp_path / "entry").exists()
    build_once(tmp_path / "entry", write_entry)
    assert not (tmp_path / "entry.partial").exists()


def test_waiting_for_another_process_has_a_deadline(tmp_path: Path) -> None:
    with FileLock(tmp_path / "entry.lock"), pytest.raises(ModelLoadError, match="another process"):
        build_once(tmp_path / "entry", write_entry, lock_timeout_s=0.1)


def test_the_cache_is_where_the_caller_then_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "from_environment"))
    assert cache_root(tmp_path / "given") == tmp_path / "given"
    assert cache_root() == tmp_path / "from_environment"
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "specdec"
