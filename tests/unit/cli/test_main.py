import subprocess
import sys

from typer.testing import CliRunner

from specdec import __version__
from specdec.cli.main import app

HEAVY = ("torch", "transformers", "grpc", "pydantic", "structlog", "redis", "rich.console", "specdec.bench.peers")


def test_help_imports_nothing_heavy() -> None:
    script = f"import sys, specdec.cli.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_every_command_of_the_design_is_there() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in ("up", "generate", "demo", "verifier", "drafter", "orchestrator"):
        assert command in shown.output


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == __version__


def test_bad_input_ends_with_code_two_and_one_line() -> None:
    for arguments in (
        ["generate", ""],
        ["generate", "hi", "--max-new-tokens", "0"],
        ["generate", "hi", "--temperature", "-1"],
        ["generate", "hi", "--rule", "typical"],
        ["generate", "hi", "--samples", "17"],
        ["generate", "hi", "--logprobs", "-1"],
        ["generate", "hi", "--prompt-logprobs", "21"],
        ["generate", "hi", "--tenant", "a b"],
        ["generate", "hi", "--endpoint", "nowhere"],
        ["up", "--proposer", "oracle"],
        ["up", "--listen", "nowhere"],
        ["up", "--proposer", "draft_model"],
        ["verifier"],
        ["drafter", "--quantization", "int3"],
        ["orchestrator", "--redis", "http://localhost"],
    ):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 2, (arguments, told.output)
        assert "Traceback" not in told.output
        assert told.stderr.startswith("error: ")
        assert len(told.stderr.strip().splitlines()) == 1
