"""A whole system of tiny models for the system tests: real processes, a real Redis-compatible server, free ports."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster

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
