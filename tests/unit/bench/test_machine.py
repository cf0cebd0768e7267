import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.bench.cpu_time import tree_cpu_s
from specdec.bench.machine import describe_commit, describe_machine


def test_machine_names_what_decides_speed() -> None:
    machine = describe_machine()
    assert machine["num_cpus"] >= 1
    assert {"cpu", "cpu_flags", "memory_bytes", "packages"} <= set(machine)


def test_outside_a_clone_there_is_no_commit(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) == ""


def test_a_changed_clone_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = describe_commit(tmp_path)
    (tmp_path / "file").write_text("two")
    assert len(clean) == 40
    assert describe_commit(tmp_path) == f"{clean}-dirty"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_cpu_time_counts_descendants() -> None:
    program = "import time\nwhile time.process_time() < 0.2: pass\nprint('spent', flush=True)\ninput()"
    with subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "$0"; true', program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        if shell.stdout is None or shell.stdin is None:
            pytest.fail("no pipes")
        shell.stdout.readline()
        spent_s = tree_cpu_s([shell.pid])
        shell.stdin.close()
    assert spent_s is not None
    assert spent_s >= 0.1
    assert (tree_cpu_s([os.getpid()]) or 0.0) > 0.0
    assert tree_cpu_s([shell.pid]) == 0.0
