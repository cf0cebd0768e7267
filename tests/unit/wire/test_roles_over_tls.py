"""Roles know one another by their certificates: real handshakes, and every call of the table by every role."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.errors import PeerUnavailableError, PermissionDeniedError, SpecdecError, UnauthenticatedError
from specdec.messages.cluster import Role
from specdec.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specdec.wire.certificates import CertificateFiles
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import error_from_rpc
from specdec.wire.role_identity import ALLOWED_CALLERS, dns_name
from tests.unit.wire.tls_files import DEADLINE_S, LONG_AGO, connected, serving, write_identity

Call = Callable[[grpc.aio.Channel], Coroutine[Any, Any, Any]]


async def get_status(channel: grpc.aio.Channel) -> None:
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    await stub.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=DEADLINE_S)


async def open_session(channel: grpc.aio.Channel) -> None:
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    async for _ in stub.OpenSession(verifier_pb2.OpenSessionRequest(), timeout=DEADLINE_S):
        pass


async def verify(channel: grpc.aio.Channel) -> None:
    call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify(timeout=DEADLINE_S)
    await call.write(verifier_pb2.VerifyRequest(attachment_id=1))
    await call.read()
    await call.done_writing()
    await call.read()


async def attach(channel: grpc.aio.Channel) -> None:
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    await stub.AttachSession(drafter_pb2.AttachSessionRequest(), timeout=DEADLINE_S)


async def detach(channel: grpc.aio.Channel) -> None:
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    await stub.DetachSession(drafter_pb2.DetachSessionRequest(), timeout=DEADLINE_S)


async def get_drafter_status(channel: grpc.aio.Channel) -> None:
    stub = drafter_pb2_grpc.DrafterServiceStub(channel)
    await stub.GetStatus(drafter_pb2.DrafterServiceGetStatusRequest(), timeout=DEADLINE_S)


async def check_health(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)


CALLS = {
    "/specdec.v1.VerifierService/GetStatus": get_status,
    "/specdec.v1.VerifierService/OpenSession": open_session,
    "/specdec.v1.VerifierService/Verify": verify,
    "/specdec.v1.DrafterService/AttachSession": attach,
    "/specdec.v1.DrafterService/DetachSession": detach,
    "/specdec.v1.DrafterService/GetStatus": get_drafter_status,
}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


class Identities:
    """Certificates of one authority by role."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self._folder = folder
        self._authority = authority

    def of(self, *names: str) -> CertificateFiles:
        return CertificateFiles(write_identity(self._folder / names[0], self._authority, *names))

    def of_role(self, role: Role) -> CertificateFiles:
        return self.of(dns_name(role))


@pytest.fixture
def identities(tmp_path: Path, authority: trustme.CA) -> Identities:
    return Identities(tmp_path, authority)


async def told(call: Coroutine[Any, Any, Any]) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from_rpc(raised.value)


def test_only_an_orchestrator_opens_sessions_or_attaches_and_only_a_drafter_drafts() -> None:
    allowed = {method.removeprefix("/specdec.v1."): callers for method, callers in ALLOWED_CALLERS.items()}
    everyone = {Role.VERIFIER, Role.DRAFTER, Role.ORCHESTRATOR}
    assert allowed == {
        "VerifierService/OpenSession": {Role.ORCHESTRATOR},
        "VerifierService/Verify": {Role.DRAFTER},
        "VerifierService/GetStatus": everyone,
        "DrafterService/AttachSession": {Role.ORCHESTRATOR},
        "DrafterService/DetachSession": {Role.ORCHESTRATOR},
        "DrafterService/GetStatus": everyone,
    }


def test_the_table_speaks_of_every_method_between_roles() -> None:
    services = (verifier_pb2.DESCRIPTOR.services_by_name, drafter_pb2.DESCRIPTOR.services_by_name)
    methods = {
        f"/{service.full_name}/{method.name}"
        for by_name in services
        for service in by_name.values()
        for method in service.methods
    }
    assert set(ALLOWED_CALLERS) == methods == set(CALLS)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("caller", Role)
async def test_a_role_is_let_in_where_the_table_says_so_and_nowhere_else(
    method: str, caller: Role, identities: Identities
) -> None:
    server = Role.VERIFIER if "Verifier" in method else Role.DRAFTER
    async with (
        serving(server, identities.of_role(server)) as endpoint,
        connected(endpoint, server, identities.of_role(caller)) as channel,
    ):
        if caller in ALLOWED_CALLERS[method]:
            await CALLS[method](channel)
        else:
            error = await told(CALLS[method](channel))
            assert type(error) is PermissionDeniedError
            assert error.metadata == {"method": method, "role": caller.value.lower()}


async def test_a_refused_request_is_not_even_parsed(identities: Identities) -> None:
    async with (
        serving(Role.DRAFTER, identities.of_role(Role.DRAFTER)) as endpoint,
        connected(endpoint, Role.DRAFTER, identities.of_role(Role.VERIFIER)) as channel,
    ):
        call = channel.unary_unary("/specdec.v1.DrafterService/AttachSession")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"\xff\xff\xff", timeout=DEADLINE_S)
        assert type(error_from_rpc(raised.value)) is PermissionDeniedError


async def test_a_certificate_of_the_authority_without_a_role_gets_health_and_nothing_else(
    identities: Identities,
) -> None:
    async with (
        serving(Role.VERIFIER, identities.of_role(Role.VERIFIER)) as endpoint,
        connected(endpoint, Role.VERIFIER, identities.of("monitoring.example.org")) as channel,
    ):
        await check_health(channel)
        for call in (get_status, open_session, verify):
            assert type(await told(call(channel))) is UnauthenticatedError


async def test_a_role_in_the_common_name_or_below_the_name_is_no_role(tmp_path: Path, identities: Identities) -> None:
    issued = trustme.CA()
    folder = tmp_path / "named"
    names = write_identity(folder, issued, "x.orchestrator.specdec", "orchestrator.specdec.example.org")
    issued_by_common_name = issued.issue_cert("nobody", common_name="orchestrator.specdec")
    server_paths = write_identity(tmp_path / "server", issued, "verifier.specdec")
    async with serving(Role.VERIFIER, CertificateFiles(server_paths)) as endpoint:
        async with connected(endpoint, Role.VERIFIER, CertificateFiles(names)) as channel:
            assert type(await told(open_session(channel))) is UnauthenticatedError
        names.certificate.write_bytes(issued_by_common_name.cert_chain_pems[0].bytes())
        names.private_key.write_bytes(issued_by_common_name.private_key_pem.bytes())
        async with connected(endpoint, Role.VERIFIER, CertificateFiles(names)) as channel:
            assert type(await told(open_session(channel))) is UnauthenticatedError


async def test_a_caller_takes_no_other_role_for_the_verifier(identities: Identities) -> None:
    """A drafter with a verifier's address gets no prompt."""
    async with (
        serving(Role.VERIFIER, identities.of_role(Role.DRAFTER)) as endpoint,
        connected(endpoint, Role.VERIFIER, identities.of_role(Role.ORCHESTRATOR)) as channel,
    ):
        error = await told(open_session(channel))
        assert type(error) is PeerUnavailableError
        assert "Hostname Verification Check failed" in error.message


async def test_strangers_do_not_get_past_the_handshake(tmp_path: Path, identities: Identities) -> None:
    stranger = write_identity(tmp_path / "stranger", trustme.CA(), dns_name(Role.ORCHESTRATOR))
    async with serving(Role.VERIFIER, identities.of_role(Role.VERIFIER)) as endpoint:
        # Signed by somebody else, though it trusts our authority:
        stranger_ca = identities.of_role(Role.ORCHESTRATOR).current().authorities_pem
        assert stranger_ca is not None
        (tmp_path / "stranger" / "ca.crt").write_bytes(stranger_ca)
        async with connected(endpoint, Role.VERIFIER, CertificateFiles(stranger)) as channel:
            assert type(await told(check_health(channel))) is PeerUnavailableError
        # Without a certificate:
        credentials = grpc.ssl_channel_credentials(stranger_ca)
        async with open_channel(endpoint, credentials=credentials, server_name=dns_name(Role.VERIFIER)) as channel:
            assert type(await told(check_health(channel))) is PeerUnavailableError
        # In plaintext:
        async with open_channel(endpoint) as channel:
            assert type(await told(check_health(channel))) is PeerUnavailableError


async def test_a_server_of_another_authority_is_not_taken(tmp_path: Path, identities: Identities) -> None:
    other = CertificateFiles(write_identity(tmp_path / "other", trustme.CA(), dns_name(Role.VERIFIER)))
    async with (
        serving(Role.VERIFIER, other) as endpoint,
        connected(endpoint, Role.VERIFIER, identities.of_role(Role.ORCHESTRATOR)) as channel,
    ):
        error = await told(check_health(channel))
        assert type(error) is PeerUnavailableError
        assert "CERTIFICATE_VERIFY_FAILED" in error.message


async def test_a_caller_whose_certificate_has_expired_does_not_get_past_the_handshake(
    tmp_path: Path, authority: trustme.CA, identities: Identities
) -> None:
    expired = authority.issue_cert(dns_name(Role.ORCHESTRATOR), **LONG_AGO)
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), expired.private_key_pem.bytes(), expired.cert_chain_pems[0].bytes()
    )
    async with (
        serving(Role.VERIFIER, identities.of_role(Role.VERIFIER)) as endpoint,
        open_channel(endpoint, credentials=credentials, server_name=dns_name(Role.VERIFIER)) as channel,
    ):
        assert type(await told(check_health(channel))) is PeerUnavailableError


async def test_in_plaintext_on_loopback_everything_is_allowed() -> None:
    async with serving(Role.VERIFIER, None) as endpoint, open_channel(endpoint) as channel:
        for call in (get_status, open_session, verify, check_health):
            await call(channel)
