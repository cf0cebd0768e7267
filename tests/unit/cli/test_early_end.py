"""A signal that comes while a command is still being imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def exit_code_of(arguments: list[str], folder: Path) -> int:
    """Of a command that gets SIGTERM while it imports typer, which is the first thing that every one of them needs."""
    (folder / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nraise ImportError\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.getcwd()))}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True).returncode


@pytest.mark.parametrize("role", ["verifier", "drafter", "orchestrator"])
def test_a_role_that_is_told_to_end_while_it_is_imported_ends_by_itself(role, tmp_path):
    assert exit_code_of(["specdec.cli.main", role], tmp_path) == 0


@pytest.mark.parametrize("module", ["verifier_service", "drafter_service", "orchestrator"])
def test_so_does_a_role_that_is_run_as_a_module(module, tmp_path):
    assert exit_code_of([module], tmp_path) == 0


def test_any_other_command_dies_of_the_signal(tmp_path):
    assert exit_code_of(["specdec.cli.main", "generate"], tmp_path) == -signal.SIGTERM
