"""The committed tokens of one session, prompt included, and their digest, both growing with the new tokens alone."""

import hashlib
from collections.abc import Sequence

from orchestrator.record import encode_tokens


class TokenPrefix:
    """`digest()` equals specdec.ids.digest_tokens of everything that was added."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._hash = hashlib.sha256()
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids.extend(token_ids)
        self._hash.update(encode_tokens(token_ids))

    def digest(self) -> bytes:
        return self._hash.copy().digest()

    def snapshot(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)
