"""The supervisor of `specdec up`, over stand-in roles: real processes without models."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from specdec.cli.cluster_options import ClusterOptions, CommandBuilder
from specdec.cli.processes import LocalCluster, RoleProgress, RoleState
from specdec.cli.role_process import RoleFailedError

pytestmark = pytest.mark.system

STAND_IN = Path(__file__).with_name("stand_in_role.py")


def stand_ins(**modes: str) -> CommandBuilder:
    def build(role: str, arguments: Sequence[str]) -> Sequence[str]:
        return [sys.executable, str(STAND_IN), role, modes.get(role, "serve"), *arguments]

    return build


def options(tmp_path: Path, **changes: object) -> ClusterOptions:
    defaults: dict[str, object] = {"model": "m", "log_folder": tmp_path, "stop_grace_s": 5.0, "start_timeout_s": 30.0}
    return ClusterOptions(**{**defaults, **changes})  # type: ignore[arg-type]


def until_gone(pids: Sequence[int], deadline_s: float = 10.0) -> list[int]:
    """The processes that still run when the time is up; a zombie does not run."""

    def running() -> list[int]:
        left = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
        return left

    deadline = time.monotonic() + deadline_s
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


async def test_every_role_starts_is_told_its_peers_and_stops_in_order(tmp_path: Path) -> None:
    progress: list[RoleProgress] = []
    cluster = LocalCluster(options(tmp_path, num_drafters=2), on_progress=progress.append, command_builder=stand_ins())
    async with cluster:
        pids = list(cluster.pids.values())
        assert set(cluster.endpoints) == {"verifier", "drafter-0", "drafter-1", "orchestrator"}
        assert cluster.endpoint == cluster.endpoints["orchestrator"]
        first_record = json.loads((tmp_path / "orchestrator.log").read_text().splitlines()[0])
        given = dict(zip(first_record["arguments"][::2], first_record["arguments"][1::2], strict=True))
        assert given["--verifiers"] == cluster.endpoints["verifier"]
        assert given["--drafters"].split(",") == [cluster.endpoints["drafter-0"], cluster.endpoints["drafter-1"]]
        assert [entry.name for entry in progress if entry.state is RoleState.READY].count("orchestrator") == 1
    assert until_gone(pids) == []
    stopped = [entry.name for entry in progress if entry.state is RoleState.STOPPED]
    assert stopped[0] == "orchestrator"
    assert stopped[-1] == "verifier"
    assert len(stopped) == 4


async def test_no_drafter_is_started_for_proposer_none(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path, proposer="none"), command_builder=stand_ins()) as cluster:
        assert set(cluster.endpoints) == {"verifier", "orchestrator"}


async def test_a_role_that_dies_early_is_named_with_its_last_words_and_the_others_stop(tmp_path: Path) -> None:
    cluster = LocalCluster(options(tmp_path), command_builder=stand_ins(drafter="die_early"))
    with pytest.raises(RoleFailedError) as failure:
        await cluster.start()
    assert failure.value.name == "drafter-0"
    assert failure.value.what == "ended with exit code 3"
    assert failure.value.last_lines[-1] == "no such model: nonsense"
    assert cluster.pids == {}


async def test_a_role_that_dies_later_is_noticed(tmp_path: Path) -> None:
    async with LocalCluster(options(tmp_path), command_builder=stand_ins(drafter="die_late")) as cluster:
        async with asyncio.timeout(20):
            death = await anext(cluster.deaths())
        assert death.name == "drafter-0"
        assert death.what == "ended with exit code 0"


async def test_a_role_that_never_serves_is_given_up_after_the_start_timeout(tmp_path: Path) -> None:
    cluster = LocalCluster(options(tmp_path, start_timeout_s=2.0), command_builder=stand_ins(verifier="slow"))
    with pytest.raises(RoleFailedError, match="verifier"):
        await cluster.start()
    assert cluster.pids == {}


async def test_a_role_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    progress: list[RoleProgress] = []
    cluster = LocalCluster(
        options(tmp_path, stop_grace_s=0.3), on_progress=progress.append, command_builder=stand_ins(drafter="deaf")
    )
    await cluster.start()
    pids = list(cluster.pids.values())
    await cluster.stop()
    assert until_gone(pids) == []
    assert [entry.name for entry in progress if entry.state is RoleState.KILLED] == ["drafter-0"]


async def test_what_a_role_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    cluster = LocalCluster(options(tmp_path), command_builder=stand_ins(orchestrator="parent"))
    await cluster.start()
    tree = [child.pid for child in psutil.Process(cluster.pids["orchestrator"]).children(recursive=True)]
    assert len(tree) == 1
    await cluster.stop()
    assert until_gone(tree) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_roles_die_with_a_parent_that_is_killed_outright(tmp_path: Path) -> None:
    script = f"""
import asyncio, json
from tests.system.test_local_cluster import options, stand_ins
from specdec.cli.processes import LocalCluster
from pathlib import Path
async def main():
    async with LocalCluster(options(Path({str(tmp_path)!r})), command_builder=stand_ins()) as cluster:
        print(json.dumps(list(cluster.pids.values())), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root)
    try:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 3
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=10)
    assert until_gone(pids) == []
