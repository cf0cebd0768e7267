"""Certificates in files, as an operator mounts them, and servers and callers that use them."""

import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import trustme

from specdec.config import CertificatePaths, WireSettings
from specdec.messages.cluster import Role
from specdec.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specdec.wire.certificates import CertificateFiles
from specdec.wire.channel import RoleChannel
from specdec.wire.interceptors import Context
from specdec.wire.role_identity import RoleGate
from specdec.wire.server import GrpcServer

DEADLINE_S = 10.0
LONG_AGO = {"not_before": datetime.datetime(2020, 1, 1), "not_after": datetime.datetime(2021, 1, 1)}


def write_identity(folder: Path, authority: trustme.CA, *names: str, **validity: datetime.datetime) -> CertificatePaths:
    """A certificate of `authority` with these DNS names, and the authority itself, over what lay there."""
    folder.mkdir(exist_ok=True)
    paths = CertificatePaths(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    issued = authority.issue_cert(*names, **validity)
    paths.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    paths.private_key.write_bytes(issued.private_key_pem.bytes())
    (folder / "ca.crt").write_bytes(authority.cert_pem.bytes())
    return paths


class Verifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers whoever is let in."""

    async def GetStatus(self, request: Any, context: Context) -> verifier_pb2.VerifierServiceGetStatusResponse:
        return verifier_pb2.VerifierServiceGetStatusResponse()

    async def OpenSession(self, request: Any, context: Context) -> AsyncIterator[verifier_pb2.OpenSessionResponse]:
        yield verifier_pb2.OpenSessionResponse()

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        async for request in request_iterator:
            yield verifier_pb2.VerifyResponse(attachment_id=request.attachment_id)


class Drafter(drafter_pb2_grpc.DrafterServiceServicer):
    async def AttachSession(self, request: Any, context: Context) -> drafter_pb2.AttachSessionResponse:
        return drafter_pb2.AttachSessionResponse()

    async def DetachSession(self, request: Any, context: Context) -> drafter_pb2.DetachSessionResponse:
        return drafter_pb2.DetachSessionResponse()

    async def GetStatus(self, request: Any, context: Context) -> drafter_pb2.DrafterServiceGetStatusResponse:
        return drafter_pb2.DrafterServiceGetStatusResponse()


@contextlib.asynccontextmanager
async def serving(
    role: Role, certificates: CertificateFiles | None, wire: WireSettings | None = None
) -> AsyncIterator[str]:
    """A server of the role, which holds its callers to the table; yields its endpoint."""
    server = GrpcServer(
        "127.0.0.1:0", wire=wire, certificates=certificates, gate=RoleGate() if certificates is not None else None
    )
    if role is Role.VERIFIER:
        service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
        server.add(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, Verifier(), service)
    else:
        service = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
        server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, Drafter(), service)
    endpoint = await server.start()
    await server.set_serving()
    try:
        yield endpoint
    finally:
        await server.stop(grace_s=0)


@contextlib.asynccontextmanager
async def connected(
    endpoint: str, role: Role, certificates: CertificateFiles | None
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of somebody with these certificates to a server that must be of the role."""
    channel = RoleChannel(endpoint, role, WireSettings(), certificates)
    try:
        yield channel.current()
    finally:
        await channel.close()
