"""How a client comes in: by TLS or not, with a bearer token or not. Options and environment of every command that asks
a running system."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.failures import UsageError

if TYPE_CHECKING:
    import grpc
    import grpc.aio

TOKEN_VARIABLE = "SPECDEC_TOKEN"  # noqa: S105 - its name
TOKEN_FILE_VARIABLE = "SPECDEC_TOKEN_FILE"  # noqa: S105 - its name
TLS_VARIABLE = "SPECDEC_TLS"
TLS_CA_VARIABLE = "SPECDEC_TLS_CA"

Tls = Annotated[
    bool, typer.Option("--tls/--plaintext", envvar=TLS_VARIABLE, help="Encrypt, and trust the usual authorities.")
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


def read_access(
    endpoint: str,
    *,
    tls: bool = False,
    tls_ca: Path | None = None,
    token: str | None = None,
    token_file: Path | None = None,
    insecure_token: bool = False,
) -> Access:
    """As the options say; the token is taken from the environment where they give none.

    Raises:
        UsageError: they do not go together, or a token would cross a network in plaintext.
        OSError: a file cannot be read.
    """
    from specdec.config import is_loopback

    if token is not None and token_file is not None:
        raise UsageError("either --token or --token-file")
    if token_file is not None:
        token = token_file.read_text().strip()
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError("the token holds what no token can")
    encrypted = tls or tls_ca is not None
    try:
        on_this_machine = is_loopback(endpoint)
    except ValueError as error:
        raise UsageError(f"--endpoint: {error}") from None
    if token is not None and not (encrypted or on_this_machine or insecure_token):
        raise UsageError("the token would cross the network in plaintext: add --tls or --tls-ca, or --insecure-token")
    return Access(encrypted, None if tls_ca is None else tls_ca.read_bytes(), token)
