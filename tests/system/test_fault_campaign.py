"""`specdec bench-faults` as a user runs it: a short campaign, every fault on real processes, and every promise kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

_TIMEOUT_S = 400.0
_KINDS = (
    "verifier:kill",
    "verifier:half_open",
    "orchestrator-verifier:hold_both",
    "drafter:stop",
    "drafter-verifier:reset",
    "orchestrator:kill",
    "client-orchestrator:hold_to_client",
    "store:kill_losing_tail",
    "store:kill_losing_all",
    "orchestrator-store:hold_to_server",
)


def _run(command: str, *options: str) -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-m", "specdec.cli.main", command, *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def test_no_promise_is_broken_while_every_role_and_every_link_fails_once(tmp_path: Path) -> None:
    json_path = tmp_path / "campaign.json"
    ran = _run(
        "bench-faults",
        *("--faults", str(len(_KINDS)), "--kinds", ",".join(_KINDS), "--sessions", "6", "--requests", "12"),
        *("--max-new-tokens", "60", "--verifiers", "2", "--drafters", "2", "--session-ttl", "10", "--draft", ""),
        *("--log-folder", str(tmp_path / "logs"), "--json", str(json_path)),
    )
    assert json_path.exists(), ran.stderr
    report = json.loads(json_path.read_text())
    assert {promise["name"]: promise["examples"] for promise in report["promises"] if promise["num_broken"]} == {}
    assert ran.returncode == 0, ran.stderr
    assert report["complete"]
    assert {name: kind["num_faults"] for name, kind in report["kinds"].items()} == dict.fromkeys(_KINDS, 1)
    assert report["num_tokens"] > 0
    assert report["recovery"]["num_pauses"] > 0


def test_a_kind_of_fault_that_there_is_not_is_told_in_one_line() -> None:
    ran = _run("bench-faults", "--kinds", "oracle:kill")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: no kind of fault begins with 'oracle:kill'")
    assert len(ran.stderr.strip().splitlines()) == 1
