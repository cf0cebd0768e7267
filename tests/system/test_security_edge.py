"""Who gets in at an orchestrator, over real connections: by certificate, token, tenant and scope."""

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrator.embedded_store import EmbeddedStore
from specdec.cli.access import Access
from specdec.cli.admin_client import AdminClient
from specdec.cli.answer import Answer, collect
from specdec.cli.client import GenerationClient
from specdec.config import WireSettings
from specdec.errors import (
    MessageTooLargeError,
    PeerUnavailableError,
    PermissionDeniedError,
    SpecdecError,
    TooManyStreamsError,
    UnauthenticatedError,
    UnknownSessionError,
)
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import error_from_rpc
from specdec.wire.server import GrpcServer
from tests.system.fakes import FakeVerifier, served_verifier
from tests.system.orchestrator_harness import DEADLINE_S, OUTPUT, SPEC, error_of, long_spec, orchestrator
from tests.unit.orchestrator.web_token_issuer import ISSUER, PUBLIC_KEYS, seconds_from_now, token, write_jwks

pytestmark = pytest.mark.system

ALICE, BOB, ROOT = "alice-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
AUTHORITY = trustme.CA()
AUTHORITY_PEM = AUTHORITY.cert_pem.bytes()


def with_token(name: str | None) -> Access:
    return Access(tls=True, authorities_pem=AUTHORITY_PEM, token=name)


class Edge:
    """An orchestrator that serves clients by TLS and asks for tokens."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder

    async def generate(self, access: Access, *, tenant: str = "", session_id: str = "") -> Answer:
        async with GenerationClient(self.endpoint, timeout_s=DEADLINE_S, tenant=tenant, access=access) as client:
            await client.wait_for_model(DEADLINE_S)
            return await collect(client.generate(SPEC, session_id))

    async def refusal(self, access: Access, *, tenant: str = "") -> SpecdecError:
        """What a call is refused with; `wait_for_model` would go on for ever."""
        async with GenerationClient(self.endpoint, timeout_s=DEADLINE_S, tenant=tenant, access=access) as client:
            return await error_of(collect(client.generate(SPEC)))


def write_certificate(folder: Path) -> dict[str, Path]:
    issued = AUTHORITY.issue_cert("localhost", "127.0.0.1")
    (folder / "edge.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    (folder / "edge.key").write_bytes(issued.private_key_pem.bytes())
    return {"edge_tls_cert": folder / "edge.crt", "edge_tls_key": folder / "edge.key"}


def write_tokens(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "tokens.json"
    path.write_text(json.dumps({"tokens": entries}))
    return path


def entry(name: str, tenant: str, *scopes: str) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "scopes": scopes}


@contextlib.asynccontextmanager
async def edge_of(folder: Path, redis: EmbeddedStore, **settings: Any) -> AsyncIterator[Edge]:
    async with (
        served_verifier(FakeVerifier()) as verifier,
        orchestrator([verifier], redis=redis.url, **write_certificate(folder), **settings) as unencrypted,
    ):
        yield Edge(unencrypted.endpoint, folder)


@pytest_asyncio.fixture
async def edge(tmp_path: Path, redis: EmbeddedStore) -> AsyncIterator[Edge]:
    tokens = write_tokens(tmp_path, entry(ALICE, "acme"), entry(BOB, "other"), entry(ROOT, "staff", "admin"))
    jwt_settings = {
        "auth_jwks": write_jwks(tmp_path / "jwks.json"),
        "auth_jwt_issuer": ISSUER.issuer,
        "auth_jwt_audience": ISSUER.audience,
    }
    async with edge_of(tmp_path, redis, auth_tokens=tokens, **jwt_settings) as served:
        yield served


async def test_a_token_lets_in_over_tls(edge: Edge) -> None:
    assert list((await edge.generate(with_token(ALICE))).token_ids) == OUTPUT
    assert list((await edge.generate(with_token(ALICE), tenant="acme")).token_ids) == OUTPUT
    assert list((await edge.generate(with_token(token(tenant="acme")))).token_ids) == OUTPUT


async def test_without_a_token_or_with_a_wrong_one_nobody_gets_in(edge: Edge) -> None:
    for name in (None, "alice-0123456789abcdeX", "", ALICE + "," + BOB):
        assert type(await edge.refusal(with_token(name))) is UnauthenticatedError


async def test_jwts_that_must_not_pass_do_not(edge: Edge) -> None:
    for bad in (
        token(exp=seconds_from_now(-60)),
        token(aud="another"),
        token(tenant=None),
        "eyJhbGciOiJub25lIiwia2lkIjoiUlMyNTYifQ.eyJ0ZW5hbnQiOiJhY21lIn0.",
    ):
        error = await edge.refusal(with_token(bad))
        assert type(error) is UnauthenticatedError
        assert bad not in error.message + repr(error.metadata)


async def test_plaintext_and_other_authorities_do_not_get_through(edge: Edge) -> None:
    for access in (
        Access(token=ALICE),
        Access(tls=True, token=ALICE),
        Access(tls=True, authorities_pem=trustme.CA().cert_pem.bytes(), token=ALICE),
    ):
        assert type(await edge.refusal(access)) is PeerUnavailableError


async def test_a_call_for_another_tenant_than_the_token_s_is_denied(edge: Edge) -> None:
    assert type(await edge.refusal(with_token(ALICE), tenant="other")) is PermissionDeniedError
    assert type(await edge.refusal(with_token(token(tenant="acme")), tenant="other")) is PermissionDeniedError


async def test_another_tenant_s_session_is_not_there(edge: Edge) -> None:
    """The tenant is the credential's, though neither call names one."""
    answer = await edge.generate(with_token(ALICE), session_id="mine")
    async with GenerationClient(edge.endpoint, timeout_s=DEADLINE_S, access=with_token(BOB)) as bob:
        assert type(await error_of(collect(bob.resume("mine", answer.token_ids, SPEC)))) is UnknownSessionError
        assert not await bob.cancel("mine")
    async with GenerationClient(edge.endpoint, timeout_s=DEADLINE_S, access=with_token(ALICE)) as alice:
        assert list((await collect(alice.resume("mine", answer.token_ids[:3], SPEC))).token_ids)


async def test_administration_needs_its_scope(edge: Edge) -> None:
    async def status_as(access: Access) -> Any:
        async with AdminClient(edge.endpoint, access) as client:
            return await client.cluster_status()

    for allowed in (ROOT, token(tenant="staff", scope="other admin")):
        assert (await status_as(with_token(allowed))).endpoints
    for denied in (ALICE, token(tenant="acme", scope="administrator")):
        with pytest.raises(PermissionDeniedError):
            await status_as(with_token(denied))
    with pytest.raises(UnauthenticatedError):
        await status_as(with_token(None))


async def test_health_is_for_everyone_and_reflection_for_whoever_has_a_token(edge: Edge) -> None:
    credentials = grpc.ssl_channel_credentials(AUTHORITY_PEM)
    async with open_channel(edge.endpoint, credentials=credentials) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        async def services(*metadata: tuple[str, str]) -> Any:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                timeout=DEADLINE_S, metadata=metadata
            )
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            return await call.read()

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await services()
        assert type(error_from_rpc(raised.value)) is UnauthenticatedError
        assert (await services(("authorization", f"Bearer {ALICE}"))).list_services_response.service


async def test_two_tokens_or_another_scheme_are_no_token(edge: Edge) -> None:
    credentials = grpc.ssl_channel_credentials(AUTHORITY_PEM)
    async with open_channel(edge.endpoint, credentials=credentials) as channel:
        call = channel.unary_unary("/specdec.v1.GenerationService/GetStatus")
        for metadata in (
            [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")],
            [("authorization", f"Basic {ALICE}")],
            [("authorization", ALICE)],
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(b"", metadata=metadata, timeout=DEADLINE_S)
            assert type(error_from_rpc(raised.value)) is UnauthenticatedError


async def test_a_token_taken_out_of_the_file_ends_with_the_next_call(edge: Edge) -> None:
    await edge.generate(with_token(ALICE))
    write_tokens(edge.folder, entry(BOB, "other"))
    assert type(await edge.refusal(with_token(ALICE))) is UnauthenticatedError
    assert await edge.generate(with_token(BOB))
    write_jwks(edge.folder / "jwks.json", PUBLIC_KEYS[:1])
    assert type(await edge.refusal(with_token(token("EdDSA")))) is UnauthenticatedError


async def test_a_new_certificate_is_shown_without_a_restart(edge: Edge) -> None:
    new_authority = trustme.CA()
    issued = new_authority.issue_cert("127.0.0.1")
    (edge.folder / "edge.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    (edge.folder / "edge.key").write_bytes(issued.private_key_pem.bytes())
    assert await edge.generate(Access(tls=True, authorities_pem=new_authority.cert_pem.bytes(), token=ALICE))
    assert type(await edge.refusal(with_token(ALICE))) is PeerUnavailableError


async def test_one_address_has_no_more_calls_open_than_it_may(tmp_path: Path, redis: EmbeddedStore) -> None:
    async with edge_of(tmp_path, redis, max_streams_per_peer=3) as edge:
        access = with_token(None)
        async with GenerationClient(edge.endpoint, timeout_s=DEADLINE_S, access=access) as client:
            await client.wait_for_model(DEADLINE_S)
            streams = [client.generate(long_spec(), f"s{number}") for number in range(3)]
            for stream in streams:
                await anext(stream)
            async with GenerationClient(edge.endpoint, timeout_s=DEADLINE_S, access=access) as another:
                error = await error_of(collect(another.generate(SPEC)))
                assert type(error) is TooManyStreamsError
                assert error.retry_after_s is not None
                await streams[0].aclose()
                await another.wait_for_model(DEADLINE_S)  # asks until the server has seen that stream's end
            for stream in streams:
                await stream.aclose()


async def test_without_credentials_configured_the_call_says_its_tenant(tmp_path: Path, redis: EmbeddedStore) -> None:
    async with edge_of(tmp_path, redis) as edge:
        assert list((await edge.generate(with_token(None), tenant="whoever")).token_ids) == OUTPUT


async def test_metadata_beyond_the_limit_is_refused_by_its_reason(tmp_path: Path, redis: EmbeddedStore) -> None:
    async with edge_of(tmp_path, redis, wire=WireSettings(max_metadata_bytes=4096)) as edge:
        credentials = grpc.ssl_channel_credentials(AUTHORITY_PEM)
        async with open_channel(edge.endpoint, credentials=credentials) as channel:
            call = channel.unary_unary("/specdec.v1.GenerationService/GetStatus")
            await call(b"", metadata=[("x-filler", "x" * 2000)], timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(b"", metadata=[("x-filler", "x" * 5000)], timeout=DEADLINE_S)
            assert type(error_from_rpc(raised.value)) is MessageTooLargeError


async def test_a_server_has_no_more_connections_than_it_may() -> None:
    server = GrpcServer("127.0.0.1:0", wire=WireSettings(max_connections=2))
    endpoint = await server.start()
    await server.set_serving()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)

        async def watch(number: int) -> int:
            options = [("grpc.use_local_subchannel_pool", 1), ("test.number", number)]  # a connection of its own
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options))
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            return (await call.read()).status

        assert [await watch(0), await watch(1)] == [health_pb2.HealthCheckResponse.SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch(2)
        assert type(error_from_rpc(raised.value)) is PeerUnavailableError


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
async def test_plaintext_stays_on_this_machine_unless_told_otherwise(listen: str) -> None:
    with pytest.raises(ValueError, match="TLS or insecure_bind"):
        GrpcServer(listen)
    GrpcServer(listen, insecure_bind=True)
