"""Do processes grow? Thousands of requests through all roles, every other one left by its client at a random token.

    python bench/churn.py --requests 5000 --json out/churn.json

Samples memory, file descriptors and threads of each process on the way, and what is still open at the end. Exit code 1
where a session, an attachment or a block outlives its request. Linux alone.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specdec.bench.machine import describe_commit, describe_machine
from specdec.bench.report_file import write_report
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.errors import OverloadedError
from specdec.messages import Delta, Load
from specdec.params import GenerationSpec, SamplingParams, StopCriteria
from specdec.v1 import verifier_pb2, verifier_pb2_grpc
from specdec.wire.channel import open_channel
from specdec.wire.convert.status import server_status_from_pb

NUM_CLIENTS = 32
NUM_SAMPLES = 20
SETTLE_TIMEOUT_S = 30.0
SHARED_PROMPT = tuple(range(300, 364))


@dataclasses.dataclass
class Tally:
    """Requests by how they ended. An overloaded server refuses, which is no end of a session."""

    finished: int = 0
    left: int = 0
    refused: int = 0


def usage_of(pid: int) -> dict[str, int]:
    """Resident memory in bytes, open file descriptors and threads of a process."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return {
        "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "num_fds": len(os.listdir(f"/proc/{pid}/fd")),
        "num_threads": int(status["Threads"]),
    }


async def request(client: GenerationClient, number: int, tally: Tally) -> None:
    """One output of up to 48 tokens over a prompt that begins like others; left early every other time."""
    choice = random.Random(number)  # noqa: S311 - a fixed plan, not a secret
    prompt = SHARED_PROMPT[: choice.randrange(1, 64)] + tuple(choice.randrange(300, 3000) for _ in range(40))
    spec = GenerationSpec(
        prompt,
        sampling=SamplingParams(temperature=choice.choice((0.0, 0.8)), seed=number),
        stop=StopCriteria(max_new_tokens=choice.randrange(8, 48)),
    )
    leave_after = choice.randrange(0, 24) if number % 2 else None
    num_tokens = 0
    events = client.generate(spec)
    try:
        async for event in events:
            num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            if leave_after is not None and num_tokens >= leave_after:
                tally.left += 1
                return
        tally.finished += 1
    except OverloadedError:
        tally.refused += 1
        await asyncio.sleep(0.1)
    finally:
        await events.aclose()


async def verifier_load(endpoint: str) -> Load:
    async with open_channel(endpoint) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        response = await stub.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=10)
    return server_status_from_pb(response.status).load


async def settled_load(endpoint: str) -> Load:
    """The verifier's load once nothing is open, or after the time is up."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        load = await verifier_load(endpoint)
        num_open = load.num_active_sessions + load.num_waiting_sessions + load.num_attachments
        if (num_open == 0 and load.kv_used_bytes == 0) or time.monotonic() > deadline:
            return load
        await asyncio.sleep(0.2)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    cluster_options = ClusterOptions(
        model=options.target, proposer=options.proposer, draft_model=options.draft_model
    ).validated()
    tally, samples = Tally(), list[dict[str, Any]]()
    async with LocalCluster(cluster_options) as cluster, GenerationClient(cluster.endpoint) as client:
        await client.wait_for_model(60)
        numbers = iter(range(options.requests))

        async def worker() -> None:
            for number in numbers:
                await request(client, number, tally)
                if number % max(1, options.requests // NUM_SAMPLES) == 0:
                    usage = {name: usage_of(pid) for name, pid in cluster.pids.items()}
                    samples.append({"num_requests": number, **usage})

        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(NUM_CLIENTS)))
        elapsed_s = time.monotonic() - began
        load = await settled_load(cluster.endpoints["verifier"])
        samples.append({"num_requests": options.requests, **{n: usage_of(pid) for n, pid in cluster.pids.items()}})
    roles = [name for name in samples[0] if name != "num_requests"]
    return {
        "settings": {**vars(options), "json": str(options.json), "num_clients": NUM_CLIENTS},
        "requests": dataclasses.asdict(tally),
        "elapsed_s": elapsed_s,
        "left_over": dataclasses.asdict(load),
        "clean": load.num_active_sessions
        == load.num_waiting_sessions
        == load.num_attachments
        == load.kv_used_bytes
        == 0,
        "growth": {role: growth([sample[role] for sample in samples]) for role in roles},
        "samples": samples,
    }


def growth(usages: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """Medians of the second and of the last quarter: the first quarter fills pools and caches."""
    quarter = max(1, len(usages) // 4)
    return {
        key: {
            "second_quarter": statistics.median(usage[key] for usage in usages[quarter : 2 * quarter] or usages),
            "last_quarter": statistics.median(usage[key] for usage in usages[-quarter:]),
        }
        for key in usages[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--target", default="synthetic:seed=1,forward_ms=2")
    parser.add_argument("--proposer", default="draft_model")
    parser.add_argument("--draft-model", default="synthetic:seed=1,acceptance=0.8")
    parser.add_argument("--json", type=Path, default=Path("out/churn.json"))
    options = parser.parse_args()
    report = {"commit": describe_commit(Path(__file__).parent), "machine": describe_machine()}
    report |= asyncio.run(run(options))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_report(options.json, report)
    for role, figures in report["growth"].items():
        rss = figures["rss_bytes"]
        print(f"{role}: {rss['second_quarter'] / 1e6:.0f} MB, then {rss['last_quarter'] / 1e6:.0f} MB")
    print(f"{report['requests']} in {report['elapsed_s']:.0f} s; left over: {report['left_over']}")
    return 0 if report["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
