"""A whole system under TLS: every role as a process of its own, with the certificates that `specdec certs` writes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from typer.testing import CliRunner

from specdec.cli.access import Access
from specdec.cli.answer import collect
from specdec.cli.certs import AUTHORITY, role_options
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.main import app
from specdec.cli.processes import LocalCluster
from specdec.config import CertificatePaths, WireSettings
from specdec.errors import PeerUnavailableError, PermissionDeniedError, SpecdecError
from specdec.messages import Delta, Finished
from specdec.messages.cluster import Role
from specdec.params import GenerationSpec, SamplingParams, StopCriteria
from specdec.v1 import verifier_pb2
from specdec.v1.verifier_pb2_grpc import VerifierServiceStub
from specdec.wire.certificates import CertificateFiles
from specdec.wire.channel import RoleChannel, open_channel
from specdec.wire.interceptors import error_from_rpc
from specdec.wire.role_identity import dns_name

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),  # four processes start, on whatever else the machine does
]

DEADLINE_S = 60.0
TARGET = "synthetic:seed=1,forward_ms=3"
DRAFT_MODEL = "synthetic:seed=1,acceptance=0.9"
TOKEN = "alice-0123456789abcdef"


def spec(max_new_tokens: int = 48) -> GenerationSpec:
    return GenerationSpec(
        "hello", sampling=SamplingParams(temperature=0.0), stop=StopCriteria(max_new_tokens=max_new_tokens)
    )


def write_certificates(folder: Path) -> None:
    assert CliRunner().invoke(app, ["certs", str(folder)]).exit_code == 0


class Secured:
    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    @property
    def access(self) -> Access:
        return Access(tls=True, authorities_pem=(self.folder / f"{AUTHORITY}.crt").read_bytes(), token=TOKEN)

    def client(self) -> GenerationClient:
        return GenerationClient(self.cluster.endpoint, timeout_s=DEADLINE_S, access=self.access)

    def channel_of(self, caller: Role, server: Role) -> RoleChannel:
        """To the cluster's own server, as somebody with the certificate of `caller`."""
        certificate, key, authorities = (Path(part) for part in role_options(self.folder, caller.value.lower())[1::2])
        files = CertificateFiles(CertificatePaths(certificate, key, authorities))
        name = "verifier" if server is Role.VERIFIER else "drafter-0"
        return RoleChannel(self.cluster.endpoints[name], server, WireSettings(), files)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("pki")
    write_certificates(folder)
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps({"tokens": [{"token": TOKEN, "tenant": "acme"}]}))
    options = ClusterOptions(
        model=TARGET,
        proposer="draft_model",
        draft_model=DRAFT_MODEL,
        num_threads=1,
        num_draft_threads=1,
        certificates=folder,
        start_timeout_s=280.0,
        extra_arguments={"orchestrator": ("--auth-tokens", str(tokens))},
    ).validated()
    with pytest.MonkeyPatch.context() as environment:
        for role in Role:
            environment.setenv(f"SPECDEC_{role.name}_WIRE__PAD_MESSAGES_TO_BYTES", "512")
        async with LocalCluster(options) as cluster:
            secured = Secured(cluster, folder)
            async with secured.client() as client:
                await client.wait_for_model(DEADLINE_S)
            yield secured


async def refusal(call: Any) -> SpecdecError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from_rpc(raised.value)


async def open_session(channel: grpc.aio.Channel) -> None:
    async for _ in VerifierServiceStub(channel).OpenSession(verifier_pb2.OpenSessionRequest(), timeout=DEADLINE_S):
        pass


async def test_an_output_is_drafted_verified_and_streamed_under_tls(secured: Secured) -> None:
    async with asyncio.timeout(DEADLINE_S), secured.client() as client:
        answer = await collect(client.generate(spec()))
        assert len(answer.token_ids) == 48
        while answer.acceptance_rate is None:  # a short output may end before its drafter is let in at the verifier
            answer = await collect(client.generate(spec()))


async def test_a_drafter_opens_no_session_and_a_verifier_attaches_nobody(secured: Secured) -> None:
    as_drafter = secured.channel_of(Role.DRAFTER, Role.VERIFIER)
    assert type(await refusal(open_session(as_drafter.current()))) is PermissionDeniedError
    as_verifier = secured.channel_of(Role.VERIFIER, Role.DRAFTER)
    attach = as_verifier.current().unary_unary("/specdec.v1.DrafterService/AttachSession")
    assert type(await refusal(attach(b"", timeout=DEADLINE_S))) is PermissionDeniedError
    await as_drafter.close()
    await as_verifier.close()


async def test_a_client_reaches_no_verifier(secured: Secured) -> None:
    async with open_channel(
        secured.cluster.endpoints["verifier"],
        credentials=secured.access.credentials,
        server_name=dns_name(Role.VERIFIER),
    ) as channel:
        assert type(await refusal(open_session(channel))) is PeerUnavailableError


async def test_the_authority_changes_under_a_running_stream_and_new_ones_start(secured: Secured) -> None:
    """Last: the certificates of the tests before are no good afterwards."""
    async with secured.client() as client:
        running = client.generate(spec(max_new_tokens=400))
        received = 0
        async for event in running:
            received += len(event.token_ids) if isinstance(event, Delta) else 0
            if received >= 10:
                break
        (secured.folder / f"{AUTHORITY}.crt").unlink()
        (secured.folder / f"{AUTHORITY}.key").unlink()
        write_certificates(secured.folder)
        async with secured.client() as newcomer:
            answer = await collect(newcomer.generate(spec()))
        assert len(answer.token_ids) == 48
        async for event in running:
            received += len(event.token_ids) if isinstance(event, Delta) else 0
            finished = event
        assert isinstance(finished, Finished)
        assert received == 400
        assert finished.num_failovers == 0
