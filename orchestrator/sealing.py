"""Seals what a session's record says of its text: AES-256-GCM under keys that only the orchestrators have.

Tokens are sealed part by part, as they come, and the parts are joined:

    length of what follows   4 bytes, little-endian
    key's name               8 bytes
    nonce                    12 bytes, random
    ciphertext and tag       the tokens as little-endian int32, and 16 bytes

Each session has a key of its own, derived from the one in the file, so that random nonces cannot meet. Session, kind
and position of a part are authenticated with it: parts that were moved, within a session or between two, do not open.
What this does not stop is an old record put in the place of a new one. Knows bytes and keys, no store.
"""

import functools
import hmac
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from orchestrator.record import PLAIN, RecordCodec, decode_tokens, encode_tokens
from specdec.errors import RecordUnreadableError, UnusableFileError
from specdec.ids import SessionId

_KEY_BYTES = 32
_KEY_NAME_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LENGTH = struct.Struct("<I")
_SMALLEST_PART_BYTES = _KEY_NAME_BYTES + _NONCE_BYTES + _TAG_BYTES
_NUM_SESSIONS_REMEMBERED = 4096


def read_key_file(path: Path) -> tuple[bytes, ...]:
    """Keys of 32 bytes, one a line as 64 hexadecimal digits; empty lines and those that begin with # do not count.

    Raises:
        OSError: the file cannot be read.
        UnusableFileError: a line is something else, or there is no key.
    """
    keys = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key = bytes.fromhex(line.strip())
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise UnusableFileError(f"{path}: line {number} is not a key of 64 hexadecimal digits") from None
        keys.append(key)
    if not keys:
        raise UnusableFileError(f"{path}: holds no key")
    return tuple(keys)


class RecordSeal:
    """The first key seals, all of them open. Without keys everything is plain."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_name_of(key): key for key in keys}
        self._first = next(iter(self._keys), "")
        self._session = functools.lru_cache(_NUM_SESSIONS_REMEMBERED)(self._new_session)

    def writing(self, session_id: SessionId) -> RecordCodec:
        return self._session(session_id, self._first) if self._first else PLAIN

    def reading(self, session_id: SessionId, sealed_by: str) -> RecordCodec:
        """Raises RecordUnreadableError where the record was sealed with a key that is not here."""
        if not sealed_by:
            return PLAIN
        if sealed_by not in self._keys:
            raise RecordUnreadableError("the session's record is sealed with a key that this server does not have")
        return self._session(session_id, sealed_by)

    def _new_session(self, session_id: SessionId, key_name: str) -> "_SessionSeal":
        return _SessionSeal(session_id, key_name, self._keys)


class _SessionSeal:
    """One session's codec: seals with one key, opens with any."""

    def __init__(self, session_id: SessionId, key_name: str, keys: dict[str, bytes]) -> None:
        self.sealed_by = key_name
        self._session = session_id.encode()
        self._keys = keys
        self._cipher = self._cipher_of(key_name)
        self._digest_key = _derived(keys[key_name], b"digests", self._session)

    def seal_request(self, request: bytes) -> bytes:
        return self._seal(b"request", 0, request)

    def open_request(self, data: bytes) -> bytes:
        request, after = self._open(b"request", 0, data, 0)
        if after != len(data):
            raise RecordUnreadableError("the request of the session's record was altered")
        return request

    def seal_tokens(self, start_position: int, token_ids: Sequence[int]) -> bytes:
        return self._seal(b"tokens", start_position, encode_tokens(token_ids))

    def open_tokens(self, data: bytes) -> tuple[int, ...]:
        token_ids: list[int] = []
        offset = 0
        while offset < len(data):
            part, offset = self._open(b"tokens", len(token_ids), data, offset)
            token_ids += decode_tokens(part)
        return tuple(token_ids)

    def kept_digest(self, digest: bytes) -> bytes:
        return hmac.digest(self._digest_key, digest, "sha256")

    def _seal(self, kind: bytes, position: int, plain: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, plain, self._place(kind, position))
        length = _KEY_NAME_BYTES + _NONCE_BYTES + len(sealed)
        return _LENGTH.pack(length) + bytes.fromhex(self.sealed_by) + nonce + sealed

    def _open(self, kind: bytes, position: int, data: bytes, offset: int) -> tuple[bytes, int]:
        """The part that begins at the offset, and where the next one does."""
        begin = offset + _LENGTH.size
        end = begin + int.from_bytes(data[offset:begin], "little")
        if end > len(data) or end - begin < _SMALLEST_PART_BYTES:
            raise RecordUnreadableError("a part of the session's record was cut")
        key_name = data[begin : begin + _KEY_NAME_BYTES].hex()
        if key_name not in self._keys:
            raise RecordUnreadableError("a part of the session's record is sealed with a key that is not here")
        cipher = self._cipher if key_name == self.sealed_by else self._cipher_of(key_name)
        nonce_at = begin + _KEY_NAME_BYTES
        sealed_at = nonce_at + _NONCE_BYTES
        try:
            plain = cipher.decrypt(data[nonce_at:sealed_at], data[sealed_at:end], self._place(kind, position))
        except InvalidTag as error:
            raise RecordUnreadableError("a part of the session's record was altered or moved") from error
        return plain, end

    def _cipher_of(self, key_name: str) -> AESGCM:
        return AESGCM(_derived(self._keys[key_name], b"parts", self._session))

    def _place(self, kind: bytes, position: int) -> bytes:
        return b"\0".join((b"specdec.record.v1", kind, self._session, position.to_bytes(8, "little")))


def _name_of(key: bytes) -> str:
    return _derived(key, b"name", b"")[:_KEY_NAME_BYTES].hex()


def _derived(key: bytes, purpose: bytes, session: bytes) -> bytes:
    info = b"\0".join((b"specdec.record.v1", purpose, session))
    return HKDFExpand(algorithm=SHA256(), length=_KEY_BYTES, info=info).derive(key)
