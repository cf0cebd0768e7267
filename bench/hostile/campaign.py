"""Honest sessions on a whole system, hostile messages to each of its services in turn, and what came of both."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import psutil

from bench.hostile.attack import Attack, Target
from bench.hostile.sound import sound_messages, sound_requests
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.errors import OverloadedError, SessionExistsError, SpecdecError
from specdec.messages import Delta
from specdec.params import GenerationSpec, SamplingParams, StopCriteria
from specdec.v1 import admin_pb2, drafter_pb2, generation_pb2, verifier_pb2

NUM_HONEST = 4
NUM_TOKENS = 32
HONEST_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 60.0
MAX_FAULTS_TOLD = 20


@dataclasses.dataclass
class Honest:
    """Outputs of honest clients by how they ended."""

    equal: int = 0
    changed: int = 0
    turned_away: int = 0
    """Refused for load before anything began, which is no disturbance of a session."""
    failed: int = 0


def _honest_spec(number: int) -> GenerationSpec:
    sampling = SamplingParams(temperature=0.9, seed=number) if number % 2 else SamplingParams(temperature=0.0)
    return GenerationSpec(
        f"honest {number}",
        sampling=sampling,
        stop=StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True),
    )


async def _output(client: GenerationClient, number: int, session_id: str = "") -> list[int]:
    events = client.generate(_honest_spec(number), session_id)
    return [token_id async for event in events if isinstance(event, Delta) for token_id in event.token_ids]


async def _stay_honest(
    client: GenerationClient, number: int, expected: list[int], names: list[str], tally: Honest
) -> None:
    """One output after the other until cancelled; hostile messages use the name of the one that runs."""
    for turn in itertools.count():
        names[number] = f"honest-{number}-{turn}"
        try:
            async with asyncio.timeout(HONEST_TIMEOUT_S):
                same = await _output(client, number, names[number]) == expected
        except (OverloadedError, SessionExistsError):  # or a stranger was first to use the name
            tally.turned_away += 1
            await asyncio.sleep(0.1)
        except (SpecdecError, TimeoutError):
            tally.failed += 1
        else:
            tally.equal += same
            tally.changed += not same


def _targets(cluster: LocalCluster, names: list[str]) -> dict[str, Target]:
    """What is sent to whom. Names of honest sessions stand in what untrusted peers send, not where only a credential
    would keep a stranger from acting as their owner."""
    guessed = {"session_id": names, "epoch": [1, 2, 3], "attachment_id": [1, 2, 3]}
    strangers = {"session_id": ["nobody", "a.0"], "owner_nonce": [b"n" * 16], "epoch": [1, 2, 3]}
    sound = (*sound_messages(), *sound_requests(cluster.endpoints["verifier"]))
    files = {
        "generation": (cluster.endpoint, generation_pb2, "GenerationService", guessed),
        "admin": (cluster.endpoint, admin_pb2, "AdminService", strangers),
        "verifier": (cluster.endpoints["verifier"], verifier_pb2, "VerifierService", strangers),
        "drafter": (cluster.endpoints["drafter-0"], drafter_pb2, "DrafterService", guessed),
    }
    return {
        name: Target(endpoint, file.DESCRIPTOR.services_by_name[service], sound, likely)
        for name, (endpoint, file, service, likely) in files.items()
    }


def _unhandled(cluster: LocalCluster) -> Iterator[str]:
    for path in sorted(cluster.log_folder.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if json.loads(line).get("event") in ("unhandled_error", "session_failed"):
                    yield f"{path.stem}: {line[:500]}"


async def run(num_messages: int, seed: int) -> dict[str, Any]:
    """The report; `sound` tells whether nobody was hurt."""
    options = ClusterOptions(
        model="synthetic:seed=1,forward_ms=1",
        proposer="draft_model",
        draft_model="synthetic:seed=1,acceptance=0.8",
        num_threads=1,
        num_draft_threads=1,
    ).validated()
    async with LocalCluster(options) as cluster, GenerationClient(cluster.endpoint, tenant="honest") as client:
        await client.wait_for_model(MODEL_TIMEOUT_S)
        expected = [await _output(client, number) for number in range(NUM_HONEST)]
        pids, tally, attacks = dict(cluster.pids), Honest(), {}
        names = ["nobody"] * (NUM_HONEST + 1)  # of the sessions that run, and one that does not
        rss_before = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
        honest = [
            asyncio.create_task(_stay_honest(client, number, expected[number], names, tally))
            for number in range(NUM_HONEST)
        ]
        for name, target in _targets(cluster, names).items():
            attack, began = Attack(target, num_messages, seed), time.monotonic()
            await attack.run()
            attacks[name] = {
                "num_sent": attack.num_sent,
                "elapsed_s": time.monotonic() - began,
                "answers": dict(sorted(attack.answers.items())),
                "faults": attack.faults[:MAX_FAULTS_TOLD],
            }
        for task in honest:
            task.cancel()
        await asyncio.gather(*honest, return_exceptions=True)
        after = [await _output(client, number) for number in range(NUM_HONEST)]
        dead = sorted(name for name, pid in pids.items() if not psutil.pid_exists(pid))
        unhandled = list(_unhandled(cluster))
        rss_mb = {
            name: [round(rss_before[name] / 1e6), round(psutil.Process(pid).memory_info().rss / 1e6)]
            for name, pid in pids.items()
            if name not in dead
        }
    is_unhurt = tally.changed == tally.failed == 0 and tally.equal > 0 and after == expected
    return {
        "settings": {"num_messages": num_messages, "seed": seed, "num_honest": NUM_HONEST},
        "attacks": attacks,
        "honest": dataclasses.asdict(tally),
        "dead": dead,
        "unhandled": unhandled[:MAX_FAULTS_TOLD],
        "rss_mb": rss_mb,
        "sound": is_unhurt and not dead and not unhandled and not any(attack["faults"] for attack in attacks.values()),
    }
