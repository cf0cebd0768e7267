"""`specdec certs`: an authority of one's own and a certificate for each role, to try TLS with. For production the
certificates come from whoever issues them there."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.failures import UsageError, told_in_one_line

AUTHORITY = "ca"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write; an authority that is there signs the new ones.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of the orchestrator for clients; may be given again.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are good for.")] = 90,
) -> None:
    """Make an authority and certificates for the roles, to try TLS with."""
    with told_in_one_line():
        from specdec.cli.development_authority import DevelopmentAuthority
        from specdec.messages.cluster import Role
        from specdec.wire.role_identity import dns_name

        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is no folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            authority = DevelopmentAuthority.in_folder(folder, AUTHORITY, days)
            roles = {role: role.value.lower() for role in Role}
            for role, name in roles.items():
                of_clients = (*_LOCAL_NAMES, *(host or ())) if role is Role.ORCHESTRATOR else ()
                authority.write_certificate(folder, name, (dns_name(role), *of_clients), days)
        except ValueError as error:
            raise UsageError(str(error)) from None
        print(
            f"{folder}: {AUTHORITY}.crt and, for each of {', '.join(roles.values())}, a certificate and its key.\n"
            f"Try:  specdec up --certs {folder}\n"
            f'      specdec generate "Hello" --tls-ca {folder / AUTHORITY}.crt\n'
            f"Whoever has {AUTHORITY}.key can make more of them: it belongs on no server."
        )


def role_options(folder: Path, role: str) -> list[str]:
    """Command line options with which a role uses what is in the folder. Raises ValueError where it is not there."""
    paths = {"cert": folder / f"{role}.crt", "key": folder / f"{role}.key", "ca": folder / f"{AUTHORITY}.crt"}
    for path in paths.values():
        if not path.is_file():
            raise ValueError(f"there is no {path}: specdec certs {folder} makes it")
    return [part for name, path in paths.items() for part in (f"--tls-{name}", str(path))]
