"""A client in another language, from the .proto files alone."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.embedded_store import EmbeddedStore
from specdec.cli.processes import LocalCluster
from tests.system.node_client import install_node_client, run_node_client
from tests.system.scripted_service import ScriptedService, scripted_service
from tests.system.test_security_edge import ALICE, AUTHORITY_PEM, edge_of, entry, with_token, write_tokens

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_node_client(tmp_path_factory.mktemp("node"))


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[ScriptedService, str]]:
    async with scripted_service() as service_and_endpoint:
        yield service_and_endpoint


async def test_node_client_prints_the_text_as_it_comes_and_says_why_it_ended(
    node_client: Path, scripted: tuple[ScriptedService, str]
) -> None:
    service, endpoint = scripted
    result = await run_node_client(node_client, "--endpoint", endpoint, "--max-new-tokens", "2", "say two words")
    assert (result.exit_code, result.stdout) == (0, "two wörds held back\n")
    assert result.stderr.strip() == "FINISH_REASON_LENGTH: 2 tokens in 1 rounds, 1 of 4 draft tokens accepted"
    spec = service.requests[0].spec
    assert [(message.role, message.content) for message in spec.chat.messages] == [("user", "say two words")]
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.temperature == 0
    assert spec.stop.max_new_tokens == 2


async def test_node_client_names_the_reason_of_a_refused_request(
    node_client: Path, scripted: tuple[ScriptedService, str]
) -> None:
    _, endpoint = scripted
    result = await run_node_client(node_client, "--endpoint", endpoint, "--temperature=-1", "hello")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.strip() == (
        "INVALID_ARGUMENT INVALID_PARAMETER: must be in [0, 100] (field=temperature, retry after 1.5 s)"
    )


async def test_node_client_says_so_where_no_server_answers(node_client: Path) -> None:
    result = await run_node_client(node_client, "--endpoint", "127.0.0.1:1", "hello")
    assert result.exit_code == 1
    assert result.stderr.startswith("UNAVAILABLE: ")


async def test_node_client_comes_in_by_tls_with_a_token(
    node_client: Path, tmp_path: Path, redis: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.crt").write_bytes(AUTHORITY_PEM)
    monkeypatch.setenv("SPECDEC_TLS_CA", str(tmp_path / "ca.crt"))
    async with edge_of(tmp_path, redis, auth_tokens=write_tokens(tmp_path, entry(ALICE, "acme"))) as edge:
        await edge.generate(with_token(ALICE))  # there is a model
        endpoint = edge.endpoint.replace("127.0.0.1", "localhost")  # Node grumbles at certificates of addresses
        refused = await run_node_client(node_client, "--endpoint", endpoint, "hello")
        assert refused.stderr.startswith("UNAUTHENTICATED UNAUTHENTICATED: ")
        monkeypatch.setenv("SPECDEC_TOKEN", ALICE)
        answered = await run_node_client(node_client, "--endpoint", endpoint, "hello")
        assert answered.exit_code == 0, answered.stderr


@pytest.mark.asyncio(loop_scope="module")
async def test_node_client_streams_from_the_real_system(node_client: Path, tiny_cluster: LocalCluster) -> None:
    result = await run_node_client(node_client, "--endpoint", tiny_cluster.endpoint, "--max-new-tokens", "8", "one two")
    assert result.exit_code == 0, result.stderr
    assert re.match(r"FINISH_REASON_(LENGTH|STOP_TOKEN): \d tokens in \d rounds", result.stderr)
    refused = await run_node_client(node_client, "--endpoint", tiny_cluster.endpoint, "--temperature=-1", "one two")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("INVALID_ARGUMENT INVALID_PARAMETER: temperature")
    assert "(field=temperature)" in refused.stderr
