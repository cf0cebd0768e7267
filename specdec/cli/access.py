"""How a client comes in: by TLS or not, with a bearer token or not. Options and environment of every command that asks
a running system."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.failures import UsageError
from specdec.errors import PeerUnavailableError

if TYPE_CHECKING:
    import grpc
    import grpc.aio

TOKEN_VARIABLE = "SPECDEC_TOKEN"  # noqa: S105 - its name
TOKEN_FILE_VARIABLE = "SPECDEC_TOKEN_FILE"  # noqa: S105 - its name
TLS_VARIABLE = "SPECDEC_TLS"
TLS_CA_VARIABLE = "SPECDEC_TLS_CA"

Tls = Annotated[
    bool | None,
    typer.Option("--tls/--plaintext", envvar=TLS_VARIABLE, help="Encrypt, and trust the usual authorities."),
]
TlsCa = Annotated[
    Path | None, typer.Option(envvar=TLS_CA_VARIABLE, help="Encrypt, and trust the authorities of this PEM file.")
]
Token = Annotated[
    str | None, typer.Option(help=f"Bearer token. Others can read a command line: better in ${TOKEN_VARIABLE}.")
]
TokenFile = Annotated[Path | None, typer.Option(envvar=TOKEN_FILE_VARIABLE, help="File with the bearer token.")]
InsecureToken = Annotated[
    bool, typer.Option("--insecure-token", help="Send the token in plaintext to other machines too.")
]


@dataclasses.dataclass(frozen=True)
class Access:
    """`authorities_pem` without `tls` means nothing; None are the usual ones."""

    tls: bool = False
    authorities_pem: bytes | None = None
    token: str | None = dataclasses.field(default=None, repr=False)

    @property
    def metadata(self) -> "list[tuple[str, str]]":
        """For every call."""
        return [] if self.token is None else [("authorization", f"Bearer {self.token}")]

    @property
    def credentials(self) -> "grpc.ChannelCredentials | None":
        """For the channel; None: plaintext."""
        import grpc

        return grpc.ssl_channel_credentials(self.authorities_pem) if self.tls else None

    def unreachable(self, endpoint: str, transport: str) -> PeerUnavailableError:
        """For people: what the transport says helps nobody at a command line. It is read for one thing alone."""
        if self.tls:
            return PeerUnavailableError(
                f"no server that shows a certificate of a trusted authority answers at {endpoint}"
            )
        closed_at_once = "failed to connect" in transport and "Socket closed" in transport
        hint = " in plaintext; where it speaks TLS, add --tls or --tls-ca" if closed_at_once else ""
        return PeerUnavailableError(f"no server answers at {endpoint}{hint}")


def read_access(
    endpoint: str,
    *,
    tls: bool | None = None,
    tls_ca: Path | None = None,
    token: str | None = None,
    token_file: Path | None = None,
    insecure_token: bool = False,
) -> Access:
    """As the options say; the token is taken from the environment where they give none. `tls` False: asked not to.

    Raises:
        UsageError: they do not go together, a file holds no certificate, or a token would cross a network in plaintext.
        OSError: a file cannot be read.
    """
    from specdec.config import is_loopback

    if token is not None and token_file is not None:
        raise UsageError("either --token or --token-file")
    if token_file is not None:
        token = token_file.read_text().strip()
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError("the token holds spaces or letters that no token has")
    if tls is False and tls_ca is not None:
        raise UsageError(f"either --plaintext or --tls-ca (which ${TLS_CA_VARIABLE} gives too)")
    encrypted = bool(tls) or tls_ca is not None
    try:
        on_this_machine = is_loopback(endpoint)
    except ValueError as error:
        raise UsageError(f"--endpoint: {error}") from None
    if token is not None and not (encrypted or on_this_machine or insecure_token):
        raise UsageError("the token would cross the network in plaintext: add --tls or --tls-ca, or --insecure-token")
    return Access(encrypted, None if tls_ca is None else _authorities(tls_ca), token)


def _authorities(path: Path) -> bytes:
    from cryptography.x509 import load_pem_x509_certificates

    pem = path.read_bytes()
    try:
        load_pem_x509_certificates(pem)
    except ValueError:
        raise UsageError(f"--tls-ca: {path} holds no certificate in PEM") from None
    return pem
