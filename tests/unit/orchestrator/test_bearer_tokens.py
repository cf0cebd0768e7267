"""Bearer tokens from a file: known by their hash, followed as the file changes, shown nowhere."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from orchestrator.edge.bearer_tokens import BearerTokens
from orchestrator.edge.caller import Caller
from specdec.errors import UnusableFileError

ALICE = "alice-0123456789abcdef"
BOB = "bob-0123456789abcdef"


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"tokens": entries}))
    return path


def test_a_token_is_known_by_its_hash_or_as_it_is(tmp_path: Path) -> None:
    tokens = BearerTokens(
        write(
            tmp_path / "tokens.json",
            {"sha256": digest(ALICE), "tenant": "acme", "scopes": ["admin"]},
            {"token": BOB, "tenant": "other"},
        )
    )
    assert tokens.caller_of(ALICE) == Caller("acme", frozenset({"admin"}))
    assert tokens.caller_of(BOB) == Caller("other", frozenset())
    for stranger in ("", "x", ALICE[:-1], ALICE + " ", ALICE.upper(), digest(ALICE)):
        assert tokens.caller_of(stranger) is None


def test_tokens_come_and_go_without_a_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.json", {"sha256": digest(ALICE), "tenant": "acme"})
    tokens = BearerTokens(path)
    write(path, {"sha256": digest(BOB), "tenant": "acme"})
    assert tokens.caller_of(ALICE) is None
    assert tokens.caller_of(BOB) is not None
    with structlog.testing.capture_logs() as lines:
        path.write_text(path.read_text()[:-20])
        assert tokens.caller_of(BOB) is not None
    assert [line["event"] for line in lines] == ["files_not_usable_last_good_ones_stay"]
    path.unlink()
    assert tokens.caller_of(BOB) is not None


@pytest.mark.parametrize(
    "entry",
    [
        {"tenant": "acme"},
        {"token": BOB, "sha256": digest(BOB), "tenant": "acme"},
        {"token": "short-secret", "tenant": "acme"},
        {"sha256": "short-secret", "tenant": "acme"},
        {"sha256": digest(BOB).upper(), "tenant": "acme"},
        {"token": BOB},
        {"token": BOB, "tenant": "a b"},
        {"token": BOB, "tenant": "acme", "scope": "admin"},
        {"token": BOB, "tenant": "acme", "scopes": "admin"},
    ],
)
def test_an_entry_that_makes_no_sense_is_refused_and_not_quoted(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(UnusableFileError, match=r"tokens\.0") as raised:
        BearerTokens(write(tmp_path / "tokens.json", entry))
    for secret in (BOB, "short-secret"):
        assert secret not in str(raised.value) + repr(raised.value)


def test_a_file_with_a_token_twice_or_without_json_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.json", {"token": BOB, "tenant": "a"}, {"sha256": digest(BOB), "tenant": "b"})
    with pytest.raises(UnusableFileError, match="twice"):
        BearerTokens(path)
    path.write_text("alice: acme")
    with pytest.raises(UnusableFileError, match="JSON"):
        BearerTokens(path)


def test_neither_tokens_nor_hashes_are_in_any_repr(tmp_path: Path) -> None:
    tokens = BearerTokens(write(tmp_path / "tokens.json", {"token": BOB, "tenant": "a"}))
    shown = repr(vars(tokens)) + repr(vars(tokens._file))
    assert BOB not in shown
    assert digest(BOB) not in shown
