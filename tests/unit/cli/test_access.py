"""How a client comes in, by its options: a token crosses no network in plaintext unless that was asked for."""

from pathlib import Path

import pytest

from specdec.cli.access import TOKEN_VARIABLE, Access, read_access
from specdec.cli.development_authority import DevelopmentAuthority
from specdec.cli.failures import UsageError

TOKEN = "alice-0123456789abcdef"


def authority_in(folder: Path) -> Path:
    DevelopmentAuthority.in_folder(folder, "ca", 1)
    return folder / "ca.crt"


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
    authorities = authority_in(tmp_path)
    far = "specdec.example.org:443"
    with pytest.raises(UsageError, match="plaintext"):
        read_access(far, token=TOKEN)
    assert read_access(far, token=TOKEN, tls=True) == Access(True, None, TOKEN)
    assert read_access(far, token=TOKEN, tls_ca=authorities) == Access(True, authorities.read_bytes(), TOKEN)
    assert read_access(far, token=TOKEN, insecure_token=True).token == TOKEN
    assert read_access(far).token is None


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "tök"])
def test_what_no_metadata_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_access("127.0.0.1:1", token=token)
    assert token not in str(raised.value)


def test_who_asks_for_plaintext_and_names_authorities_gets_neither(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either --plaintext or --tls-ca"):
        read_access("127.0.0.1:1", tls=False, tls_ca=authority_in(tmp_path))


def test_authorities_without_a_certificate_are_told_by_their_file(tmp_path: Path) -> None:
    authority_in(tmp_path)
    with pytest.raises(UsageError, match=r"ca\.key holds no certificate"):
        read_access("127.0.0.1:1", tls_ca=tmp_path / "ca.key")


def test_the_token_is_in_no_repr() -> None:
    assert TOKEN not in repr(Access(token=TOKEN))
