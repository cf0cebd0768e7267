"""A verifier whose kernels are not compiled yet is alive while it compiles them, and ends when it is told to."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.wire.channel import open_channel

pytestmark = pytest.mark.system
LISTEN_TIMEOUT_S = 60.0
"""Python starts, and no more: on a loaded machine that takes a while."""
END_TIMEOUT_S = 20.0


async def test_it_listens_says_that_it_does_not_serve_yet_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli.main", "verifier", "--model", "synthetic:seed=1"),
        *("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"),
        env={**os.environ, "SPECDEC_CACHE": str(tmp_path)},  # no kernel has been kept there
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        endpoint = await asyncio.wait_for(_listening(process), LISTEN_TIMEOUT_S)
        async with open_channel(endpoint) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        process.send_signal(signal.SIGTERM)
        exit_code = await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert exit_code == 0


async def _listening(process: asyncio.subprocess.Process) -> str:
    """The endpoint that the log tells."""
    if process.stderr is None:
        raise RuntimeError("no log")
    async for line in process.stderr:
        entry = json.loads(line) if line.startswith(b"{") else {}
        if entry.get("event") == "listening":
            return str(entry["endpoint"])
    raise RuntimeError("it ended before it listened")
