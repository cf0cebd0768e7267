"""SECURITY.md speaks of tests and settings that exist."""

import ast
import re
from pathlib import Path

import pytest

from specdec.config import DrafterSettings, OrchestratorSettings, VerifierSettings, WireSettings
from specdec.v1 import errors_pb2, verifier_pb2

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
LIMITS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.split("## Limits")[1].split("##")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| limit ")
]
SETTINGS = {
    name
    for settings in (VerifierSettings, DrafterSettings, OrchestratorSettings, WireSettings)
    for name in settings.model_fields
}
REASONS = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()} | {  # noqa: SIM118 - an enum
    name.removeprefix("REFUSAL_REASON_")
    for name in verifier_pb2.RefusalReason.keys()  # noqa: SIM118
}


@pytest.mark.parametrize(("path", "name"), NAMED_TESTS)
def test_each_test_that_a_claim_names_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_limit_has_a_setting_or_a_number_a_reason_and_a_test() -> None:
    assert len(LIMITS) >= 20
    for limit, setting, reason, test in LIMITS:
        named = re.findall(r"`([a-z_]+)`", setting)
        assert set(named) <= SETTINGS, limit
        assert named or re.search(r"\d|context", setting), limit
        assert set(re.findall(r"`([A-Z_]+)`", reason)) <= REASONS, limit
        assert "::" in test, limit


def test_settings_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:tls|edge|auth|token|store|pad|insecure)_\w+?)(?:=\w+)?`", PAGE))
    assert named
    assert named <= SETTINGS
