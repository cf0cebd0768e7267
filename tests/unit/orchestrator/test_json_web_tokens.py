"""A JWT is what its issuer's public key says, and nothing that its own header says."""

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm

from orchestrator.edge.caller import Caller
from orchestrator.edge.json_web_tokens import ALGORITHMS, JsonWebTokens
from specdec.errors import UnauthenticatedError, UnusableFileError
from tests.unit.orchestrator.web_token_issuer import (
    ISSUER,
    PUBLIC_KEYS,
    RSA_KEY,
    claims,
    seconds_from_now,
    token,
    write_jwks,
)


@pytest.fixture
def tokens(tmp_path: Path) -> JsonWebTokens:
    return JsonWebTokens(write_jwks(tmp_path / "jwks.json"), ISSUER)


def refusal(tokens: JsonWebTokens, given: str) -> str:
    """Why it is refused; never a word of the token itself."""
    with pytest.raises(UnauthenticatedError) as raised:
        tokens.caller_of(given)
    shown = repr(raised.value) + str(raised.value.metadata)
    assert all(part not in shown for part in given.split(".") if len(part) > 8)
    assert raised.value.__cause__ is None
    return raised.value.message


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_token_of_each_algorithm_names_its_tenant_and_scopes(tokens: JsonWebTokens, algorithm: str) -> None:
    assert tokens.caller_of(token(algorithm, scope="admin other")) == Caller("acme", frozenset({"admin", "other"}))
    assert tokens.caller_of(token(algorithm, scope=["admin"])).scopes == {"admin"}
    assert tokens.caller_of(token(algorithm)).scopes == frozenset()


def segment(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def unsigned(header: dict[str, Any]) -> str:
    body = {**claims(), "exp": int(seconds_from_now(300).timestamp())}
    return f"{segment(header)}.{segment(body)}"


@pytest.mark.parametrize("name", ["none", "None", "NONE", "nOnE"])
def test_no_algorithm_is_no_signature(tokens: JsonWebTokens, name: str) -> None:
    for kid in ("RS256", "EdDSA"):
        assert "algorithm" in refusal(tokens, unsigned({"alg": name, "kid": kid, "typ": "JWT"}) + ".")


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
@pytest.mark.parametrize("encoding", ["PEM", "DER", "JWK"])
def test_a_public_key_is_no_shared_secret(tokens: JsonWebTokens, algorithm: str, encoding: str) -> None:
    """Whoever knows the public key, which is everybody, could sign with it if the header chose the algorithm."""
    if encoding == "JWK":
        secret = json.dumps(PUBLIC_KEYS[0]).encode()
    else:
        secret = RSA_KEY.public_key().public_bytes(getattr(Encoding, encoding), PublicFormat.SubjectPublicKeyInfo)
    signed = unsigned({"alg": algorithm, "kid": "RS256", "typ": "JWT"})
    signature = hmac.new(secret, signed.encode(), getattr(hashlib, f"sha{algorithm[2:]}")).digest()
    assert "algorithm" in refusal(tokens, f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")


def test_a_key_is_taken_for_its_own_algorithm_alone(tokens: JsonWebTokens) -> None:
    assert "algorithm" in refusal(tokens, jwt.encode(claims(), RSA_KEY, "RS512", headers={"kid": "RS256"}))
    assert "algorithm" in refusal(tokens, jwt.encode(claims(), RSA_KEY, "PS256", headers={"kid": "RS256"}))
    assert "algorithm" in refusal(tokens, token("EdDSA", kid="RS256"))


def test_a_key_of_somebody_else_is_not_taken(tokens: JsonWebTokens) -> None:
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    assert "signature is wrong" in refusal(tokens, token("RS256", key=other))
    assert "signature is wrong" in refusal(tokens, token("ES256", key=ec.generate_private_key(ec.SECP256R1())))
    jwk = RSAAlgorithm.to_jwk(other.public_key(), as_dict=True)
    brought_along = jwt.encode(claims(), other, "RS256", headers={"kid": "RS256", "jwk": jwk})
    assert "signature is wrong" in refusal(tokens, brought_along)


def test_a_token_that_was_changed_is_not_taken(tokens: JsonWebTokens) -> None:
    header, _, signature = token().split(".")
    _, other_body, _ = token(tenant="other").split(".")
    assert "signature is wrong" in refusal(tokens, f"{header}.{other_body}.{signature}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"exp": seconds_from_now(-31)}, "expired"),
        ({"exp": None}, "lacks"),
        ({"nbf": seconds_from_now(3600)}, "not valid yet"),
        ({"iat": seconds_from_now(3600)}, "not valid yet"),
        ({"aud": "another"}, "audience"),
        ({"aud": None}, "lacks"),
        ({"iss": "https://elsewhere.example.org"}, "issuer"),
        ({"iss": None}, "lacks"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": ""}, "names no tenant"),
        ({"tenant": "a tenant: with blanks"}, "names no tenant"),
        ({"tenant": ["acme"]}, "names no tenant"),
        ({"exp": "soon"}, "no JWT that makes sense"),
        ({"exp": float("inf")}, "no JWT that makes sense"),
    ],
)
def test_each_claim_is_checked(tokens: JsonWebTokens, changes: dict[str, Any], why: str) -> None:
    assert why in refusal(tokens, token(**changes))


def test_clocks_may_differ_by_the_leeway(tokens: JsonWebTokens) -> None:
    assert tokens.caller_of(token(exp=seconds_from_now(-20), nbf=seconds_from_now(-300))).tenant == "acme"
    assert tokens.caller_of(token(nbf=seconds_from_now(20))).tenant == "acme"


def test_which_key_is_told_by_kid_and_a_single_key_needs_none(tmp_path: Path, tokens: JsonWebTokens) -> None:
    assert "key" in refusal(tokens, token(kid=None))
    assert "key" in refusal(tokens, token(kid="unheard-of"))
    alone = JsonWebTokens(write_jwks(tmp_path / "one.json", PUBLIC_KEYS[2:]), ISSUER)
    assert alone.caller_of(token(kid=None)).tenant == "acme"


def test_keys_are_changed_without_a_restart(tmp_path: Path, tokens: JsonWebTokens) -> None:
    old, new = token("RS256"), token("EdDSA")
    write_jwks(tmp_path / "jwks.json", PUBLIC_KEYS[2:])
    assert tokens.caller_of(new).tenant == "acme"
    assert "key" in refusal(tokens, old)
    (tmp_path / "jwks.json").write_text('{"keys": [')  # half written: those before stay
    assert tokens.caller_of(new).tenant == "acme"


SYMMETRIC = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "shared", "alg": "HS256"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"keys": 3}',
        '{"keys": []}',
        json.dumps({"keys": [SYMMETRIC]}),
        json.dumps({"keys": [*PUBLIC_KEYS, SYMMETRIC]}),
        json.dumps({"keys": [{**PUBLIC_KEYS[0], "alg": "RS512"}]}),
        json.dumps({"keys": [{**PUBLIC_KEYS[0], "n": "AQAB", "e": "%%"}]}),
        json.dumps({"keys": [RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True)]}),
        json.dumps({"keys": [PUBLIC_KEYS[0], PUBLIC_KEYS[0]]}),
        '{"keys": ' + "[" * 100_000,
    ],
)
def test_a_key_set_that_makes_no_sense_or_holds_secrets_is_refused_at_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(content)
    with pytest.raises(UnusableFileError, match=str(path)) as raised:
        JsonWebTokens(path, ISSUER)
    assert SYMMETRIC["k"] not in str(raised.value)


@given(text=st.text(alphabet=st.characters(max_codepoint=127), max_size=200), dots=st.integers(0, 4))
def test_no_text_brings_the_check_down(tmp_path_factory: pytest.TempPathFactory, text: str, dots: int) -> None:
    tokens = JsonWebTokens(write_jwks(tmp_path_factory.getbasetemp() / "fuzz.json"), ISSUER)
    with pytest.raises(UnauthenticatedError):
        tokens.caller_of(text + "." * dots + text)


def test_a_header_nested_without_end_does_not_bring_the_check_down(tokens: JsonWebTokens) -> None:
    header = base64.urlsafe_b64encode(b'{"a":' * 20_000).decode()
    assert "makes sense" in refusal(tokens, f"{header}.e30.AAAA")
