"""Bearer tokens from a file of the operator: {"tokens": [{"sha256": "...", "tenant": "acme", "scopes": ["admin"]}]}.

A token is known by its SHA-256 alone, which is what the file should hold; `token` with the token itself works too. They
are long and random, so that no slow hash is needed. Tokens are in no log, repr or error.
"""

import dataclasses
import hashlib
import hmac
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from orchestrator.edge.caller import Caller
from specdec.errors import InvalidParameterError, UnusableFileError
from specdec.last_good import LastGood
from specdec.params import validate_tenant

MIN_TOKEN_CHARS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _known_tenant(tenant: str) -> str:
    try:
        return validate_tenant(tenant)
    except InvalidParameterError as error:
        raise ValueError(error.message) from None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    sha256: str | None = None
    token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN_CHARS)
    tenant: Annotated[str, AfterValidator(_known_tenant)]
    scopes: frozenset[str] = frozenset()

    @model_validator(mode="after")
    def _one_way_to_know_it(self) -> "_Entry":
        if (self.sha256 is None) == (self.token is None):
            raise ValueError("either sha256 or token")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError("sha256: 64 lowercase hexadecimal digits")
        return self

    def digest(self) -> bytes:
        if self.token is not None:
            return _digest(self.token.get_secret_value())
        return bytes.fromhex(self.sha256 or "")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tokens: list[_Entry]


@dataclasses.dataclass(frozen=True)
class _Known:
    digest: bytes = dataclasses.field(repr=False)
    caller: Caller


class BearerTokens:
    """The file's tokens, followed as it is replaced. Raises OSError, UnusableFileError where there are none to begin
    with."""

    def __init__(self, path: Path) -> None:
        self._file = LastGood([path], lambda: _read(path), what=str(path))

    def caller_of(self, token: str) -> Caller | None:
        """None for a token that is not known. Takes as long for every token."""
        given = _digest(token)
        found = None
        for known in self._file.current():
            if hmac.compare_digest(known.digest, given):
                found = known.caller
        return found


def _read(path: Path) -> tuple[_Known, ...]:
    try:
        entries = _File.model_validate_json(path.read_bytes()).tokens
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        raise UnusableFileError(f"{path}: {place}: {fault['msg'].removeprefix('Value error, ')}") from None
    known = tuple(_Known(entry.digest(), Caller(entry.tenant, entry.scopes)) for entry in entries)
    if len({entry.digest for entry in known}) < len(known):
        raise UnusableFileError(f"{path}: a token is in it twice")
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
