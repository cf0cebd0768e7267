"""What is sealed opens only where and as it was sealed."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.record import PLAIN, RecordCodec, encode_tokens
from orchestrator.sealing import RecordSeal, read_key_file
from specdec.errors import RecordUnreadableError, UnusableFileError
from specdec.ids import SessionId, digest_tokens

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
S = SessionId("s")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def reading(seal: RecordSeal, sealed: RecordCodec) -> RecordCodec:
    return seal.reading(S, sealed.sealed_by)


@given(st.lists(TOKENS, max_size=6))
def test_parts_that_were_sealed_one_by_one_open_together(parts: list[list[int]]) -> None:
    codec = RecordSeal([NEW]).writing(S)
    data, position = b"", 0
    for part in parts:
        data += codec.seal_tokens(position, part)
        position += len(part)
    assert reading(RecordSeal([NEW]), codec).open_tokens(data) == tuple(token for part in parts for token in part)


def test_nothing_of_the_tokens_or_the_request_can_be_seen() -> None:
    codec = RecordSeal([NEW]).writing(S)
    tokens = [1_234_567, 7_654_321]
    assert encode_tokens(tokens)[:4] not in codec.seal_tokens(0, tokens)
    assert b"secret" not in codec.seal_request(b"secret")
    assert codec.seal_tokens(0, tokens) != codec.seal_tokens(0, tokens)
    # A plain digest would tell each next token to whoever tries all of them.
    assert codec.kept_digest(digest_tokens(tokens)) != digest_tokens(tokens)


def test_keys_are_rotated_the_first_seals_and_all_open() -> None:
    before, between, after = RecordSeal([OLD]), RecordSeal([NEW, OLD]), RecordSeal([NEW])
    old = before.writing(S)
    data = old.seal_tokens(0, [1, 2])
    assert between.reading(S, old.sealed_by).open_tokens(data) == (1, 2)
    assert between.reading(S, old.sealed_by).kept_digest(b"d") == old.kept_digest(b"d")
    assert between.writing(S).sealed_by == after.writing(S).sealed_by != old.sealed_by
    mixed = data + between.writing(S).seal_tokens(2, [3])
    assert between.reading(S, old.sealed_by).open_tokens(mixed) == (1, 2, 3)
    with pytest.raises(RecordUnreadableError, match="key"):
        after.reading(S, old.sealed_by)
    with pytest.raises(RecordUnreadableError, match="key"):
        after.writing(S).open_tokens(data)


def test_without_keys_nothing_is_sealed_and_a_sealed_record_is_refused() -> None:
    assert RecordSeal().writing(S) is PLAIN
    assert RecordSeal([NEW]).reading(S, "") is PLAIN
    with pytest.raises(RecordUnreadableError, match="key"):
        RecordSeal().reading(S, RecordSeal([NEW]).writing(S).sealed_by)


def test_a_part_opens_at_its_own_place_of_its_own_session_alone() -> None:
    seal = RecordSeal([NEW])
    codec = seal.writing(S)
    one, two = codec.seal_tokens(0, [1]), codec.seal_tokens(1, [2])
    assert codec.open_tokens(one + two) == (1, 2)
    for moved in (two + one, two, one + one):
        with pytest.raises(RecordUnreadableError, match="moved"):
            codec.open_tokens(moved)
    with pytest.raises(RecordUnreadableError, match="moved"):
        seal.writing(SessionId("other")).open_tokens(one)
    with pytest.raises(RecordUnreadableError, match="moved"):
        codec.open_request(one)
    with pytest.raises(RecordUnreadableError, match="altered"):
        codec.open_request(codec.seal_request(b"r") + one)


@given(st.integers(0, 80), st.integers(1, 255))
def test_a_changed_byte_never_opens(position: int, change: int) -> None:
    codec = RecordSeal([NEW]).writing(S)
    data = bytearray(codec.seal_tokens(0, range(11)))
    data[position % len(data)] ^= change
    with pytest.raises(RecordUnreadableError):
        codec.open_tokens(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_reason(data: bytes) -> None:
    codec = RecordSeal([NEW]).writing(S)
    with contextlib.suppress(RecordUnreadableError):
        assert codec.open_tokens(data) == ()


def test_a_key_file_has_a_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# new\n{NEW.hex()}\n\n{OLD.hex().upper()}\n")
    assert read_key_file(path) == (NEW, OLD)


@pytest.mark.parametrize("content", ["", "# none\n", "not a key\n", NEW.hex()[:-2], NEW.hex() + "\nff\n"])
def test_a_key_file_that_is_none_is_refused_without_showing_what_is_in_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(UnusableFileError, match="key") as caught:
        read_key_file(path)
    assert NEW.hex()[:8] not in str(caught.value)
