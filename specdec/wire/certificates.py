"""Certificates as gRPC takes them: read from files, checked, and read again when the files change.

Knows PEM and gRPC's credentials; which role may call which is role_identity's to say. A private key is in no log, repr
or error.
"""

import dataclasses
import datetime
import time
from typing import cast

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from specdec.config import CertificatePaths
from specdec.errors import UnusableFileError
from specdec.last_good import LastGood

_EXPIRY_REMINDER_S = 60.0
_AS_BYTES = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
_MAKES_NO_SENSE = (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension)
"""What the library raises for bytes that are not what they should be: some parts are read when they are asked for."""

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What the files hold. `authorities_pem` are those whose certificates the other side must have; None: nobody's."""

    chain_pem: bytes
    private_key_pem: bytes = dataclasses.field(repr=False)
    authorities_pem: bytes | None
    dns_names: frozenset[str]
    expires_at: datetime.datetime


def read_certificate(paths: CertificatePaths) -> Certificate:
    """What the files hold now.

    Raises:
        OSError: one of them cannot be read.
        UnusableFileError: a file is no PEM, the key is another certificate's, or the certificate has expired.
    """
    chain_pem = paths.certificate.read_bytes()
    private_key_pem = paths.private_key.read_bytes()
    authorities_pem = None if paths.authorities is None else paths.authorities.read_bytes()
    try:
        leaf = x509.load_pem_x509_certificates(chain_pem)[0]
        public_key, dns_names = leaf.public_key().public_bytes(*_AS_BYTES), _dns_names(leaf)
    except _MAKES_NO_SENSE:
        raise UnusableFileError(f"{paths.certificate} holds no certificate in PEM") from None
    try:
        key = load_pem_private_key(private_key_pem, password=None)
    except (*_MAKES_NO_SENSE, TypeError):  # TypeError: it has a password
        raise UnusableFileError(f"{paths.private_key} holds no private key in PEM, or one with a password") from None
    if key.public_key().public_bytes(*_AS_BYTES) != public_key:
        raise UnusableFileError(f"{paths.private_key} is not the key of {paths.certificate}")
    if authorities_pem is not None:
        try:
            x509.load_pem_x509_certificates(authorities_pem)
        except _MAKES_NO_SENSE:
            raise UnusableFileError(f"{paths.authorities} holds no certificate in PEM") from None
    if _is_expired(leaf.not_valid_after_utc):
        raise UnusableFileError(
            f"the certificate in {paths.certificate} expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    return Certificate(chain_pem, private_key_pem, authorities_pem, dns_names, leaf.not_valid_after_utc)


class CertificateFiles:
    """One identity, followed as its files are replaced. The constructor raises as `read_certificate` does."""

    def __init__(self, paths: CertificatePaths) -> None:
        given = [path for path in paths if path is not None]
        self._name = str(paths.certificate)
        self._files = LastGood(given, lambda: read_certificate(paths), what=self._name)
        self._next_reminder_at = 0.0

    def current(self) -> Certificate:
        """The last good one; says so, once a minute, where even that has expired."""
        certificate = self._files.current()
        if _is_expired(certificate.expires_at) and time.monotonic() >= self._next_reminder_at:
            self._next_reminder_at = time.monotonic() + _EXPIRY_REMINDER_S
            _log.error("certificate_expired", certificate=self._name, expired_at=certificate.expires_at.isoformat())
        return certificate

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server: each handshake is made with the certificate of its time, and needs one of the other side where
        there are authorities."""
        used = self.current()

        def newer() -> grpc.ServerCertificateConfiguration:
            nonlocal used
            current = self.current()
            if current is used:
                # None stands for no change, which the stubs of gRPC do not know.
                return cast(grpc.ServerCertificateConfiguration, None)
            used = current
            return _server_configuration(current)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(used), newer, require_client_authentication=used.authorities_pem is not None
        )


def channel_credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    """For a caller that proves who it is and asks the same of the server."""
    return grpc.ssl_channel_credentials(certificate.authorities_pem, certificate.private_key_pem, certificate.chain_pem)


def _server_configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = (certificate.private_key_pem, certificate.chain_pem)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificate.authorities_pem)


def _dns_names(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(names.value.get_values_for_type(x509.DNSName))


def _is_expired(expires_at: datetime.datetime) -> bool:
    return expires_at <= datetime.datetime.now(datetime.UTC)
