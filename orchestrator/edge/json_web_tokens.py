"""JSON Web Tokens, checked by the public keys of a JWKS file. The one room that knows PyJWT.

Signatures by RS256, ES256 or EdDSA: a key of the set says which one it is for, and a token's header cannot choose
another. Tokens are in no log, repr or error.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt

from orchestrator.edge.caller import Caller
from specdec.errors import InvalidParameterError, UnauthenticatedError, UnusableFileError
from specdec.last_good import LastGood
from specdec.params import validate_tenant

ALGORITHMS = ("RS256", "ES256", "EdDSA")
REQUIRED_CLAIMS = ("exp", "iss", "aud")


@dataclasses.dataclass(frozen=True)
class Issuer:
    """What a token must say. `leeway_s`: how far the issuer's clock may be from ours."""

    issuer: str
    audience: str
    tenant_claim: str = "tenant"
    leeway_s: float = 30.0


class JsonWebTokens:
    """The file's keys, followed as it is replaced. Raises OSError, UnusableFileError where there are none to begin
    with."""

    def __init__(self, path: Path, issuer: Issuer) -> None:
        self._file = LastGood([path], lambda: _read(path), what=str(path))
        self._issuer = issuer

    def caller_of(self, token: str) -> Caller:
        """Raises UnauthenticatedError that says what is wrong with the token."""
        try:
            claims = jwt.decode(
                token,
                key=self._key_of(token),
                algorithms=ALGORITHMS,
                audience=self._issuer.audience,
                issuer=self._issuer.issuer,
                leeway=self._issuer.leeway_s,
                options={"require": list(REQUIRED_CLAIMS), "enforce_minimum_key_length": True},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UnauthenticatedError(_fault(error)) from None
        return Caller(self._tenant_of(claims), _scopes_of(claims))

    def _key_of(self, token: str) -> jwt.PyJWK:
        """By the header's kid; without one, where there is a single key, that."""
        keys = self._file.current()
        kid = jwt.get_unverified_header(token).get("kid")
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        if not isinstance(kid, str) or kid not in keys:
            raise jwt.InvalidKeyError
        return keys[kid]

    def _tenant_of(self, claims: Mapping[str, Any]) -> str:
        tenant = claims.get(self._issuer.tenant_claim)
        try:
            if not (isinstance(tenant, str) and tenant):
                raise InvalidParameterError("none")
            return validate_tenant(tenant)
        except InvalidParameterError:
            raise UnauthenticatedError(f"the token's claim {self._issuer.tenant_claim} names no tenant") from None


def _scopes_of(claims: Mapping[str, Any]) -> frozenset[str]:
    """Words with blanks between them, as RFC 8693 has it, or a list."""
    scope = claims.get("scope", ())
    words = scope.split() if isinstance(scope, str) else scope
    return (
        frozenset(word for word in words if isinstance(word, str)) if isinstance(words, list | tuple) else frozenset()
    )


def _fault(error: Exception) -> str:
    match error:
        case jwt.ExpiredSignatureError():
            return "the token has expired"
        case jwt.ImmatureSignatureError():
            return "the token is not valid yet"
        case jwt.InvalidAudienceError():
            return "the token is for another audience"
        case jwt.InvalidIssuerError():
            return "the token is of another issuer"
        case jwt.MissingRequiredClaimError():
            return f"the token lacks one of {', '.join(REQUIRED_CLAIMS)}"
        case jwt.InvalidAlgorithmError() | jwt.InvalidKeyError():
            return "the token is signed by no key and algorithm that are taken here"
        case jwt.InvalidSignatureError():
            return "the token's signature is wrong"
        case _:
            return "the token is not known, and is no JWT that makes sense"


def _read(path: Path) -> Mapping[str, jwt.PyJWK]:
    """Keys by kid; a single one may have none."""
    try:
        listed = json.loads(path.read_bytes())["keys"]
        entries = [dict(entry) for entry in listed]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnusableFileError(f"{path} holds no JSON Web Key Set") from None
    keys = {}
    for number, entry in enumerate(entries):
        if entry.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(entry)
        except (jwt.PyJWTError, ValueError, TypeError):
            raise UnusableFileError(f"{path}: key {number} makes no sense") from None
        if key.algorithm_name not in ALGORITHMS:
            raise UnusableFileError(f"{path}: key {number} is for none of {', '.join(ALGORITHMS)}")
        if "d" in entry:
            raise UnusableFileError(f"{path}: key {number} is a private key; only the public one belongs here")
        kid = entry.get("kid", "")
        if not isinstance(kid, str) or kid in keys or (kid == "" and len(entries) > 1):
            raise UnusableFileError(f"{path}: key {number} needs a kid of its own")
        keys[kid] = key
    if not keys:
        raise UnusableFileError(f"{path} holds no key for signatures")
    return keys
