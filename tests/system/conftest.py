"""What system tests begin with: a whole system of tiny models in processes of its own, or an orchestrator in this
process before a verifier without a model. The Redis-compatible server is a real one in both."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.session_store import SessionStore, StoreSettings
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from tests.system.fakes import FakeVerifier, served_verifier
from tests.system.orchestrator_harness import Client, orchestrator, routed

START_TIMEOUT_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny_cluster(tiny_model_dir: Path) -> AsyncIterator[LocalCluster]:
    """Verifier, n-gram drafter and orchestrator, started once for a module's tests."""
    options = ClusterOptions(
        model=str(tiny_model_dir), proposer="ngram", num_threads=1, start_timeout_s=START_TIMEOUT_S
    ).validated()
    async with LocalCluster(options) as cluster:
        await until_it_answers(cluster)
        yield cluster


async def until_it_answers(cluster: LocalCluster) -> None:
    """Every role serves; the orchestrator may not have looked at the verifier since."""
    async with GenerationClient(cluster.endpoint) as client:
        await client.wait_for_model(START_TIMEOUT_S)


@pytest_asyncio.fixture
async def redis() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore() as embedded:
        yield embedded


@pytest_asyncio.fixture
async def store(redis: EmbeddedStore) -> AsyncIterator[SessionStore]:
    async with SessionStore(StoreSettings(redis.url)) as session_store:
        yield session_store


@pytest_asyncio.fixture
async def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest_asyncio.fixture
async def client(verifier: FakeVerifier, redis: EmbeddedStore) -> AsyncIterator[Client]:
    async with served_verifier(verifier) as endpoint, orchestrator([endpoint], redis=redis.url) as connected:
        await routed(connected)
        yield connected
