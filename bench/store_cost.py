"""What does the session record cost a round? Commits of many paced sessions against real servers on this machine.

    python bench/store_cost.py --json out/store.json

For each arrangement (one server or a cluster of three, plain or sealed, relaxed or strict, 1 to 256 sessions), in ms:

    on_path      what a round waits for before its tokens may go to the client: relaxed, the hand-over to the writer;
                 strict, the record itself. Neither is on the path of the next draft, which goes on at the verifier
    commit       from the writer's call to the server's answer, which in relaxed nobody waits for
    cpu          processor time of this process for each round: digest, sealing, writing, reading the answer; the whole
                 session's claim, checkpoint, renewals and end are spread over its rounds

Servers share the machine's cores with this process and with whatever else runs: see `machine.load_average_before`.
"""

import argparse
import asyncio
import contextlib
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.prefix import TokenPrefix
from orchestrator.record import Checkpoint, CommittedRound
from orchestrator.record_writer import RecordWriter
from orchestrator.session_store import Lease, SessionStore, StoreSettings, WriteStatus
from specdec.bench.machine import describe_commit, describe_machine
from specdec.bench.report_file import write_report
from specdec.ids import Round, SessionId
from specdec.params import GenerationSpec
from tests.system.store_servers import StoreCluster, running

PROMPT_LENGTH = 512
TOKENS_PER_ROUND = 4
ROUND_S = 0.25
"""Of each session: 256 of them make a thousand commits a second."""


class TimedStore(SessionStore):
    """Notes how long each commit takes."""

    def __init__(self, settings: StoreSettings) -> None:
        super().__init__(settings)
        self.commits_s: list[float] = []

    async def commit(self, lease: Lease, *rounds: CommittedRound, request_id: str | None = None) -> WriteStatus:
        began = time.perf_counter()
        status = await super().commit(lease, *rounds, request_id=request_id)
        self.commits_s.append(time.perf_counter() - began)
        return status


async def run_session(store: TimedStore, name: str, num_rounds: int, *, strict: bool, on_path_s: list[float]) -> None:
    session_id, nonce = SessionId(name), secrets.token_bytes(16)
    reply = await store.acquire(session_id, nonce)
    lease = Lease(session_id, reply.epoch, nonce)
    prefix = TokenPrefix(range(PROMPT_LENGTH))
    done = 0

    def checkpoint() -> Checkpoint:
        return Checkpoint(
            session_id=session_id,
            epoch=lease.epoch,
            owner_nonce=nonce,
            round=Round(done),
            request=GenerationSpec(prompt=(1,)),
            model="target",
            numerics_fingerprint="bits",
            verifier="127.0.0.1:1",
            drafter="127.0.0.1:2",
            prompt_length=PROMPT_LENGTH,
            verifier_cached_length=0,
            drafter_cached_length=0,
            prefix_digest=prefix.digest(),
            token_ids=prefix.snapshot(),
            tenant="",
            sample_index=0,
        )

    writer = RecordWriter(store, lease, checkpoint)
    await writer.flush()
    writing = asyncio.create_task(writer.run())
    await asyncio.sleep(secrets.randbelow(1000) / 1000 * ROUND_S)  # sessions do not march in step
    for number in range(1, num_rounds + 1):
        next_at = time.perf_counter() + ROUND_S
        tokens = tuple(range(number, number + TOKENS_PER_ROUND))
        base = len(prefix)
        began = time.perf_counter()
        prefix.extend(tokens)
        writer.push(CommittedRound(Round(number), base, tokens, prefix.digest(), base, base, "127.0.0.1:2"))
        done = number
        if strict:
            await writer.flush()
        on_path_s.append(time.perf_counter() - began)
        await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await writer.close(None)
    await store.cancel(session_id)


async def measure(settings: StoreSettings, *, num_sessions: int, num_rounds: int, strict: bool) -> dict[str, Any]:
    on_path_s: list[float] = []
    async with TimedStore(settings) as store:
        await run_session(store, "warm-up", 3, strict=strict, on_path_s=[])
        store.commits_s.clear()
        cpu_before = time.process_time()
        await asyncio.gather(
            *(
                run_session(store, f"s{index}", num_rounds, strict=strict, on_path_s=on_path_s)
                for index in range(num_sessions)
            )
        )
        cpu_s = time.process_time() - cpu_before
        return {
            "on_path_ms": spread_ms(on_path_s),
            "commit_ms": spread_ms(store.commits_s),
            "cpu_ms": round(1000 * cpu_s / (num_sessions * num_rounds), 4),
            "num_rounds": num_sessions * num_rounds,
            "num_commits": len(store.commits_s),
        }


def spread_ms(values_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values_s, n=100)
    return {"p50": round(1000 * cuts[49], 4), "p99": round(1000 * cuts[98], 4)}


@contextlib.asynccontextmanager
async def server(kind: str, folder: Path) -> AsyncIterator[str]:
    if kind == "cluster":
        async with running(StoreCluster(folder)) as cluster:
            yield cluster.url
    else:
        async with EmbeddedStore() as embedded:
            yield embedded.url


async def main(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {
        "commit": describe_commit(Path(__file__).parent),
        "machine": describe_machine(),
        "settings": {"round_s": ROUND_S, "tokens_per_round": TOKENS_PER_ROUND, "prompt_length": PROMPT_LENGTH},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys"
        key_file.write_text(secrets.token_bytes(32).hex())
        for kind in ("one server", "cluster"):
            async with server(kind, Path(folder) / "cluster") as url:
                for sealed in (False, True):
                    for durability in ("relaxed", "strict"):
                        for num_sessions in arguments.sessions:
                            figures = await measure(
                                StoreSettings(url, token_key_file=key_file if sealed else None, call_timeout_s=5.0),
                                num_sessions=num_sessions,
                                num_rounds=max(arguments.rounds, 100 // num_sessions),
                                strict=durability == "strict",
                            )
                            run = {"server": kind, "sealed": sealed, "durability": durability, "sessions": num_sessions}
                            report["runs"].append(run | figures)
                            print(
                                *run.values(),
                                figures["on_path_ms"],
                                figures["commit_ms"],
                                figures["cpu_ms"],
                                flush=True,
                            )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_report(arguments.json, report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("out/store.json"))
    parser.add_argument("--sessions", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=16, help="of each session")
    asyncio.run(main(parser.parse_args()))
