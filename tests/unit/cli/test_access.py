"""How a client comes in, by its options: a token crosses no network in plaintext unless that was asked for."""

from pathlib import Path

import pytest

from specdec.cli.access import TOKEN_VARIABLE, Access, read_access
from specdec.cli.failures import UsageError

TOKEN = "alice-0123456789abcdef"


def test_a_token_is_taken_from_the_option_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_access("127.0.0.1:1").token is None
    assert read_access("127.0.0.1:1", token=TOKEN).metadata == [("authorization", f"Bearer {TOKEN}")]
    assert read_access("127.0.0.1:1", token_file=tmp_path / "token").token == TOKEN
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_access("127.0.0.1:1").token == TOKEN
    assert read_access("127.0.0.1:1", token="another").token == "another"
    with pytest.raises(UsageError, match="either"):
        read_access("127.0.0.1:1", token=TOKEN, token_file=tmp_path / "token")


def test_a_token_crosses_no_network_in_plaintext_unless_that_was_asked_for(tmp_path: Path) -> None:
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(b"pem")
    far = "specdec.example.org:443"
    with pytest.raises(UsageError, match="plaintext"):
        read_access(far, token=TOKEN)
    assert read_access(far, token=TOKEN, tls=True) == Access(True, None, TOKEN)
    assert read_access(far, token=TOKEN, tls_ca=authorities) == Access(True, b"pem", TOKEN)
    assert read_access(far, token=TOKEN, insecure_token=True).token == TOKEN
    assert read_access(far).token is None


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "tök"])
def test_what_no_metadata_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_access("127.0.0.1:1", token=token)
    assert token not in str(raised.value)


def test_the_token_is_in_no_repr() -> None:
    assert TOKEN not in repr(Access(token=TOKEN))
