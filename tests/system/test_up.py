"""`specdec up` as a user runs it, with a tiny model: every role is a real process."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.test_local_cluster import until_gone

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 40.0


def specdec(*arguments: str, timeout_s: float = START_DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


@contextlib.contextmanager
def running_up(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str, list[int]]]:
    """The process, the orchestrator's endpoint and the process ids of everything below it."""
    command = [sys.executable, "-m", "specdec.cli.main", "up", *arguments]
    up = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        said = read_until(up, rb"serving at (\S+);")
        tree = [child.pid for child in psutil.Process(up.pid).children(recursive=True)]
        yield up, said.group(1).decode(), tree
    finally:
        if up.poll() is None:
            up.kill()
        up.communicate(timeout=STOP_DEADLINE_S)


def read_until(process: subprocess.Popen[bytes], pattern: bytes) -> re.Match[bytes]:
    assert process.stderr is not None
    said = b""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if select.select([process.stderr], [], [], 0.5)[0]:
            chunk = os.read(process.stderr.fileno(), 65536)
            said += chunk
            if found := re.search(pattern, said):
                return found
            if not chunk:
                break
    raise AssertionError(f"{pattern!r} was not said in time, but {said.decode()!r}")


def test_up_serves_the_same_ids_with_and_without_drafts_and_ctrl_c_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(tiny_model_dir), "--listen", "127.0.0.1:0", "--log-folder", str(tmp_path))
    with running_up(*arguments) as (up, endpoint, tree):
        assert len(tree) >= 4  # verifier, drafter, orchestrator and its store
        options = ["--endpoint", endpoint, "--raw", "--json", "--max-new-tokens", "48"]
        alone = specdec("generate", "one two one two one two", *options, "--no-speculation")
        together = specdec("generate", "one two one two one two", *options)
        assert alone.returncode == together.returncode == 0, alone.stderr + together.stderr
        first, second = json.loads(alone.stdout), json.loads(together.stdout)
        assert first["token_ids"] == second["token_ids"]
        assert first["speculative"]["num_drafts"] == 0
        assert second["usage"]["num_output_tokens"] == len(second["token_ids"])
        shown = specdec("generate", "one two", "--endpoint", endpoint, "--raw", "--show-drafts")
        assert shown.returncode == 0
        assert "drafted and accepted" in shown.stdout

        [drafter_pid] = [pid for pid in tree if "drafter" in psutil.Process(pid).cmdline()]
        os.kill(drafter_pid, signal.SIGKILL)
        read_until(up, b"drafter-0 was ended by SIGKILL: going on without it")
        bereft = specdec("generate", "one two one two one two", *options)
        assert json.loads(bereft.stdout)["token_ids"] == first["token_ids"]

        refused = specdec("generate", "hi", "--endpoint", endpoint, "--model", "another")
        assert refused.returncode == 2
        assert refused.stderr.endswith("(UNKNOWN_MODEL)\n")

        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=STOP_DEADLINE_S) == 0
        assert until_gone(tree) == []
    assert {path.name for path in tmp_path.iterdir()} == {"verifier.log", "drafter-0.log", "orchestrator.log"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_killing_up_outright_leaves_nothing(tiny_model_dir: Path) -> None:
    with running_up("--model", str(tiny_model_dir), "--listen", "127.0.0.1:0") as (up, _, tree):
        up.kill()
        up.wait(timeout=STOP_DEADLINE_S)
        assert until_gone(tree) == []


def test_the_demo_finds_every_answer_identical_and_writes_the_promised_keys(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "demo.json"
    shown = specdec("demo", "--model", str(tiny_model_dir), "--max-new-tokens", "40", "--json", str(path))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("identical token ids") == 3
    check_demo_report(json.loads(path.read_text()), str(tiny_model_dir))


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_demo_of_a_real_model_copies_from_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    shown = specdec("demo", "--json", str(path), timeout_s=840.0)
    assert shown.returncode == 0, shown.stderr
    report = json.loads(path.read_text())
    check_demo_report(report, "smollm2-135m")
    assert (
        report["prompts"][1]["acceptance_length"] > 1.2
    )  # the answer repeats its prompt; draft lengths follow the clock


def check_demo_report(report: dict[str, Any], model: str) -> None:
    assert (report["model"], report["proposer"], len(report["prompts"])) == (model, "ngram", 3)
    for entry in report["prompts"]:
        assert entry["identical"] is True
        assert set(entry) == {
            *("prompt", "text", "token_ids", "identical", "target_only_tokens_per_s"),
            *("speculative_tokens_per_s", "acceptance_rate", "acceptance_length"),
        }


def test_a_model_that_is_not_there_is_told_and_everything_stops() -> None:
    told = specdec("up", "--model", "no-such-model", "--listen", "127.0.0.1:0")
    assert told.returncode == 1
    assert "Traceback" not in told.stderr
    assert "no model 'no-such-model'" in told.stderr
    assert told.stderr.splitlines()[-1] == "error: verifier ended with exit code 1"


def test_a_port_in_use_is_told_before_any_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        told = specdec("up", "--listen", endpoint, timeout_s=30.0)
    assert told.returncode == 1
    assert told.stderr == f"error: {endpoint} is in use by another program\n"
