"""`specdec bench-load` and `specdec bench-engine` as a user runs them, on synthetic models."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(360)]

_TIMEOUT_S = 300.0
_TARGET = "synthetic:seed=5,forward_ms=2"
_DRAFT = "draft_model:synthetic:seed=5,acceptance=0.8"


def _run(command: str, *options: str) -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-m", "specdec.cli.main", command, *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def test_bench_load_measures_every_way_at_every_number_of_streams(tmp_path: Path) -> None:
    json_path = tmp_path / "load.json"
    profile = ["--verifier-profile", str(tmp_path / "profile")] if shutil.which("py-spy") else []
    ran = _run(
        "bench-load",
        *("--target", _TARGET, "--proposer", f"{_DRAFT},ngram", "--drafters", "2", "--sessions", "1,3"),
        *("--repetitions", "1", "--outputs", "2", "--max-new-tokens", "8", "--prompt-tokens", "20"),
        *("--log-folder", str(tmp_path / "logs"), "--json", str(json_path), *profile),
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(json_path.read_text())
    assert report["complete"] is True
    labels = ["target_only", "draft_model:synthetic:seed=5,acceptance=0.8", "ngram"]
    assert [(run["num_streams"], run["label"]) for run in report["runs"]] == [
        (num_streams, label) for num_streams in (1, 3) for label in sorted(labels, key=lambda one: one != labels[0])
    ]
    assert (report["num_mismatching_outputs"], report["num_errors"]) == (0, 0)
    for run in report["runs"]:
        assert run["num_outputs"] == 2 * run["num_streams"]
        assert run["num_tokens"] == 8 * run["num_outputs"]
        assert run["verifier"]["forward_ms"] >= 2
        assert run["tokens_per_s"] < run["predicted_tokens_per_s"]
        assert set(run["cpu_s"]) >= {"verifier", "orchestrator", "client"}
    drafted = [run for run in report["runs"] if run["label"] == labels[1]]
    assert all(run["draft_budget"] is not None for run in drafted)
    if profile:
        assert set(report["profiles"]) == set(labels)
        assert all(1 <= len(one["own"]) <= 10 for one in report["profiles"].values())


def test_bench_engine_measures_steps_forwards_and_first_tokens(tmp_path: Path) -> None:
    json_path = tmp_path / "engine.json"
    ran = _run(
        "bench-engine",
        *("--model", "synthetic:seed=5", "--sessions", "1,4", "--context", "64", "--long-prompt", "600"),
        *("--steps", "4", "--json", str(json_path)),
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(json_path.read_text())
    assert [(run["num_sessions"], run["draft_tokens"]) for run in report["steps"]] == [(1, 0), (1, 4), (4, 0), (4, 4)]
    assert [run["rows_per_step"] for run in report["steps"]][::2] == [1, 4]
    assert all(run["step_ms"] > run["forward_ms"] > 0 for run in report["steps"])
    assert report["cache"]["held_bytes_per_token"] == report["cache"]["kv_bytes_per_token"] == 16
    first = report["first_token"]
    assert first["long_prompt_was_being_read"]
    assert first["beside_long_prompt"]["num_steps"] <= first["idle"]["num_steps"] + 2


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("bench-load", ["--sessions", "0"]),
        ("bench-load", ["--proposer", "draft_model"]),
        ("bench-load", ["--target", "synthetic:speed=3", "--prompt-tokens", "8"]),
        ("bench-engine", ["--sessions", "a"]),
        ("bench-engine", ["--model", "synthetic:speed=3"]),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(command: str, options: list[str]) -> None:
    ran = _run(command, *options)
    assert ran.returncode != 0
    assert "error: " in ran.stderr
    assert "Traceback" not in ran.stderr
