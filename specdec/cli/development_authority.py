"""An authority for certificates that lives in a folder. Knows X.509; which names a role has is not known here."""

import dataclasses
import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_NAME = "specdec development authority"
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9-]*[A-Za-z0-9_])?)*")
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


@dataclasses.dataclass(frozen=True)
class DevelopmentAuthority:
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey = dataclasses.field(repr=False)

    @classmethod
    def in_folder(cls, folder: Path, name: str, days: int) -> Self:
        """The one that is there, or a new one. Raises ValueError for files that are none, OSError."""
        certificate_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
        if certificate_path.exists() or key_path.exists():
            try:
                key = load_pem_private_key(key_path.read_bytes(), password=None)
                certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            except (ValueError, TypeError):
                raise ValueError(f"{certificate_path} and {key_path} are no authority of this command's") from None
            if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
                raise ValueError(f"{key_path} is not the key of {certificate_path}")
            return cls(certificate, key)
        key = generate_private_key(SECP256R1())
        certificate = (
            _unsigned(_NAME, key, days)
            .issuer_name(_named(_NAME))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, SHA256())
        )
        _write(key_path, _pem_of_key(key), secret=True)
        _write(certificate_path, certificate.public_bytes(Encoding.PEM))
        return cls(certificate, key)

    def write_certificate(self, folder: Path, name: str, subject_names: Iterable[str], days: int) -> None:
        """NAME.crt and NAME.key, over what is there, for a server that is a client too.

        Raises:
            ValueError: a subject name is neither a DNS name nor an address.
        """
        key = generate_private_key(SECP256R1())
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([_general_name(one) for one in subject_names])
        own_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _unsigned(name, key, days)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(uses, critical=False)
            .add_extension(names, critical=False)
            .add_extension(own_key, critical=False)
            .sign(self.key, SHA256())
        )
        _write(folder / f"{name}.key", _pem_of_key(key), secret=True)
        _write(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM))


def _unsigned(name: str, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _DNS_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is neither a DNS name nor an address") from None
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of_key(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Whole or not at all: roles that run read it as it is replaced."""
    partial = path.with_name(path.name + ".new")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
    partial.replace(path)
