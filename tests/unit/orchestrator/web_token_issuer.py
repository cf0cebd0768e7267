"""Somebody who issues JWTs for clients: keys of each kind, the public ones as a JWKS file, tokens with any claims."""

import datetime
import json
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from orchestrator.edge.json_web_tokens import Issuer

ISSUER = Issuer("https://issuer.example.org", "specdec", leeway_s=30.0)
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
PRIVATE_KEYS: dict[str, Any] = {"RS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}
PUBLIC_KEYS = [
    {**RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True), "kid": "RS256", "use": "sig"},
    {**ECAlgorithm.to_jwk(EC_KEY.public_key(), as_dict=True), "kid": "ES256"},
    {**OKPAlgorithm.to_jwk(ED_KEY.public_key(), as_dict=True), "kid": "EdDSA"},
]


def write_jwks(path: Path, keys: list[dict[str, Any]] | None = None) -> Path:
    path.write_text(json.dumps({"keys": PUBLIC_KEYS if keys is None else keys}))
    return path


def claims(**changes: Any) -> dict[str, Any]:
    """Good ones, for tenant acme; a change of None leaves a claim out."""
    now = datetime.datetime.now(datetime.UTC)
    good = {
        "iss": ISSUER.issuer,
        "aud": ISSUER.audience,
        "exp": now + datetime.timedelta(minutes=5),
        "tenant": "acme",
        "sub": "somebody",
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def seconds_from_now(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)


def token(algorithm: str = "EdDSA", *, key: Any = None, kid: str | None = "", **changes: Any) -> str:
    headers = {} if kid is None else {"kid": kid or algorithm}
    return jwt.encode(claims(**changes), key or PRIVATE_KEYS[algorithm], algorithm, headers=headers)
