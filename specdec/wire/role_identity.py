"""Which role calls which: the table, the gate that holds a server to it, and what a caller expects of a server.

A role is a DNS name in the certificate, `<role>.specdec`; where it runs is no part of it. Knows no services' content.
"""

import contextlib
from collections.abc import Iterator

from specdec.config import CertificatePaths
from specdec.errors import PermissionDeniedError, UnauthenticatedError, UnusableFileError
from specdec.messages.cluster import Role
from specdec.wire.certificates import CertificateFiles
from specdec.wire.gate import HEALTH_PREFIX
from specdec.wire.interceptors import Context

TRUST_DOMAIN = "specdec"


ANY_ROLE = frozenset(Role)
ALLOWED_CALLERS = {
    "/specdec.v1.VerifierService/OpenSession": frozenset({Role.ORCHESTRATOR}),
    "/specdec.v1.VerifierService/Verify": frozenset({Role.DRAFTER}),
    "/specdec.v1.VerifierService/GetStatus": ANY_ROLE,
    "/specdec.v1.DrafterService/AttachSession": frozenset({Role.ORCHESTRATOR}),
    "/specdec.v1.DrafterService/DetachSession": frozenset({Role.ORCHESTRATOR}),
    "/specdec.v1.DrafterService/GetStatus": ANY_ROLE,
}
"""What is not in it is closed, but for Health and reflection: those are for whoever has the authority's certificate."""
_OPEN_PREFIXES = (HEALTH_PREFIX, "/grpc.reflection.")


class RoleGate:
    """Of a server that asked for a certificate in the handshake; which authority signed it was checked there."""

    @contextlib.contextmanager
    def admit(self, method: str, context: Context) -> Iterator[None]:
        """Raises UnauthenticatedError for a certificate without a role, PermissionDeniedError for the wrong one."""
        if not method.startswith(_OPEN_PREFIXES):
            roles = caller_roles(context)
            if not roles:
                raise UnauthenticatedError("the certificate names no role of this system")
            if roles.isdisjoint(ALLOWED_CALLERS.get(method, ())):
                names = ", ".join(sorted(role.value.lower() for role in roles))
                raise PermissionDeniedError(f"{method} is not for the role {names}", method=method, role=names)
        yield


def dns_name(role: Role) -> str:
    """What the certificate of a role names."""
    return f"{role.value.lower()}.{TRUST_DOMAIN}"


def caller_roles(context: Context) -> frozenset[Role]:
    """Roles that the caller's certificate names. Other kinds of names than DNS names are not looked at."""
    names = {name.decode(errors="replace") for name in (context.auth_context() or {}).get("peer_dns", ())}
    return frozenset(role for role in Role if dns_name(role) in names)


def role_certificates(paths: CertificatePaths | None, role: Role) -> CertificateFiles | None:
    """This role's own; None where the roles speak in plaintext.

    Raises:
        OSError: a file cannot be read.
        UnusableFileError: as `read_certificate`, and for a certificate with which nobody would take us for `role`.
    """
    if paths is None:
        return None
    certificates = CertificateFiles(paths)
    if dns_name(role) not in certificates.current().dns_names:
        raise UnusableFileError(f"the certificate in {paths.certificate} does not have the DNS name {dns_name(role)}")
    return certificates
