"""The Node client for the tests: copied out of the repository, installed from its lock file, run."""

import asyncio
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_INSTALL_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class NodeResult:
    exit_code: int
    stdout: str
    stderr: str


def install_node_client(folder: Path) -> Path:
    """Returns the program's path. Skips the test, with the reason, where Node or its packages cannot be had."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    client = folder / "clients" / "node"
    shutil.copytree(_REPOSITORY / "clients" / "node", client, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(_REPOSITORY / "protos", folder / "protos")
    command = ["npm", "ci", "--no-progress"]
    try:
        subprocess.run(command, cwd=client, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"`npm ci` did not end within {_INSTALL_TIMEOUT_S:g} s: no npm registry in reach?")
    except subprocess.CalledProcessError as error:
        if "ENOTFOUND" in error.stderr or "ECONNREFUSED" in error.stderr or "EAI_AGAIN" in error.stderr:
            pytest.skip("no npm registry is in reach")
        pytest.fail(f"npm ci: {error.stderr[-2000:]}")
    return client / "generate.js"


async def run_node_client(program: Path, *arguments: str) -> NodeResult:
    process = await asyncio.create_subprocess_exec(
        "node", str(program), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_RUN_TIMEOUT_S):
            stdout, stderr = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return NodeResult(process.returncode or 0, stdout.decode(), stderr.decode())
