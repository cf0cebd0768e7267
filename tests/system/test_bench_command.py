"""`specdec bench` as a user runs it, over real processes of tiny models."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(360)]  # each starts a system, one starts two and the peers

_TIMEOUT_S = 300.0
_PROMPTS = [
    {"id": "a", "category": "code", "turns": ["one two one two one two", "never asked"]},
    {"id": "b", "category": "qa", "turns": ["three four three four"]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in _PROMPTS))
    return path


def _command(model: Path, prompts: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "specdec.cli.main", "bench", "--target", str(model), "--prompts", str(prompts)]
    return [*command, "--take", "other=1", "--threads", "1", "--log-folder", str(prompts.parent / "logs"), *options]


def test_bench_measures_each_proposer_and_the_peers_over_one_verifier(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    json_path = tmp_path / "bench.json"
    proposers = ["--proposer", f"ngram,draft_model:{tiny_model_dir}:none"]
    options = ["--max-new-tokens", "12", "--peers", "--peer-dtype", "float32", "--json", str(json_path)]
    command = _command(tiny_model_dir, prompts, *proposers, *options)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "1/2 code a: target_only" in ran.stderr
    report = json.loads(json_path.read_text())
    assert report["complete"] is True
    assert [(run["proposer"], run["category"], run["prompts"]) for run in report["runs"]] == [
        ("ngram", "code", 1),
        ("ngram", "qa", 1),
        ("draft_model", "code", 1),
        ("draft_model", "qa", 1),
    ]
    assert sum(run["mismatching_prompts"] for run in report["runs"]) == 0
    assert all(rate > 0 for run in report["runs"] for rate in run["peers_tokens_per_s"].values())
    assert set(report["runs"][0]["peers_tokens_per_s"]) == {
        "transformers_greedy",
        "transformers_assisted",
        "transformers_assisted_4",
        "transformers_prompt_lookup",
    }
    assert report["peers"]["prompts"] == 2
    assert report["peers"]["differently_tokenised_prompts"] == 0
    assert report["settings"]["numerics"]["fingerprint"]
    logs = {str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")}
    assert logs == {
        "transformers.log",
        "lane-0/verifier.log",
        "lane-0/drafter-0.log",
        "lane-0/orchestrator.log",
        "lane-1/drafter-0.log",  # the first lane's verifier serves all
        "lane-1/orchestrator.log",
    }


def test_an_interrupted_bench_writes_what_it_has_and_says_so(
    tiny_model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    many = [{"id": str(number), "category": "code", "turns": ["one two one two"]} for number in range(2000)]
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in many))
    json_path = tmp_path / "bench.json"
    options = ["--take", "code=2000", "--max-new-tokens", "4", "--json", str(json_path)]
    with subprocess.Popen(
        _command(tiny_model_dir, prompts, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stderr is not None
        try:
            for line in bench.stderr:  # ends with the process, which the test's own time limit bounds
                if line.startswith("1/2000 "):
                    break
            bench.send_signal(signal.SIGINT)
            _, rest = bench.communicate(timeout=_TIMEOUT_S)
        finally:
            if bench.poll() is None:
                os.kill(bench.pid, signal.SIGKILL)
    assert bench.returncode == 130, rest
    assert rest.splitlines()[-1] == "error: interrupted"
    report = json.loads(json_path.read_text())
    assert (report["complete"], report["ended_by"]) == (False, "interrupted")
    assert report["runs"][0]["prompts"] >= 1


@pytest.mark.parametrize(
    "options", [["--proposer", "medusa"], ["--proposer", "stacked"], ["--take", "cooking=1"], ["--peer-dtype", "int3"]]
)
def test_what_cannot_be_run_is_told_before_anything_starts(prompts: Path, options: list[str]) -> None:
    ran = subprocess.run(
        _command(Path("nowhere"), prompts, *options), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
