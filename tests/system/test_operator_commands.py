"""`specdec ps`, `top`, `sessions`, `drain`, `undrain` and `kill` as processes of their own before a running system."""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from specdec.params import FinishReason
from specdec.v1 import generation_pb2
from specdec.wire.convert import generation_spec_to_pb
from tests.system.fakes import FakeDrafter, FakeVerifier, served_drafter, served_verifier
from tests.system.orchestrator_harness import (
    SLOW_S,
    Client,
    drained,
    eventually,
    long_spec,
    orchestrator,
    read_until_tokens,
    routed,
)

pytestmark = pytest.mark.system
TIMEOUT_S = 60.0


class Ran(NamedTuple):
    code: int
    lines: list[str]
    errors: str


class System(NamedTuple):
    client: Client
    verifiers: list[str]
    drafter: str

    async def specdec(self, *arguments: str) -> Ran:
        process = await self.begin(*arguments)
        async with asyncio.timeout(TIMEOUT_S):
            output, faults = await process.communicate()
        return Ran(process.returncode or 0, output.decode().splitlines(), faults.decode())

    async def begin(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specdec.cli.main", *arguments, "--endpoint", self.client.endpoint),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


@contextlib.asynccontextmanager
async def system() -> AsyncIterator[System]:
    async with (
        served_verifier(FakeVerifier(round_s=SLOW_S)) as first,
        served_verifier(FakeVerifier(round_s=SLOW_S)) as second,
        served_drafter(FakeDrafter()) as drafter,
        orchestrator([first, second], [drafter]) as client,
    ):
        await routed(client, 4)
        yield System(client, [first, second], drafter)


async def test_ps_shows_every_server_as_a_table_and_as_json() -> None:
    async with system() as one:
        shown = await one.specdec("ps")
        assert shown.code == 0
        assert shown.lines[0].split()[:3] == ["ROLE", "ENDPOINT", "HEALTH"]
        assert [line.split()[:3] for line in shown.lines[1:]] == [
            ["orchestrator", one.client.endpoint, "ok"],
            ["verifier", one.verifiers[0], "ok"],
            ["verifier", one.verifiers[1], "ok"],
            ["drafter", one.drafter, "ok"],
        ]
        told = json.loads((await one.specdec("ps", "--json")).lines[0])
        assert told["endpoints"][0]["role"] == "ORCHESTRATOR"


async def test_top_prints_look_after_look_into_a_pipe_and_ends_in_order_on_ctrl_c() -> None:
    async with system() as one:
        shown = await one.specdec("top", "--frames", "2", "--interval", "0.1", "--json")
        assert [json.loads(line)["store_healthy"] for line in shown.lines] == [True, True]
        process = await one.begin("top", "--interval", "0.1")
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while b"drafter" not in await process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            _, faults = await process.communicate()
        assert (process.returncode, faults) == (0, b"")


async def test_sessions_are_listed_and_one_is_killed() -> None:
    async with system() as one:
        calls = {name: one.client.call(long_spec(), name, tenant="team-a") for name in ("a", "b")}
        answers = {name: await read_until_tokens(call, 2) for name, call in calls.items()}
        listed = await one.specdec("sessions")
        assert [line.split()[:3] for line in listed.lines[1:]] == [
            ["a", "team-a", "streaming"],
            ["b", "team-a", "streaming"],
        ]
        assert (await one.specdec("kill", "a")).lines == ["a is ended"]
        answer = await read_until_tokens(calls["a"], 10_000, answers["a"])
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.CANCELLED
        assert await one.client.session_ids() == ["b"]
        again = await one.specdec("kill", "a")
        assert again.code == 2
        assert again.errors.count("\n") == 1
        assert "UNKNOWN_SESSION" in again.errors
        calls["b"].cancel()


async def test_drain_waits_until_a_verifier_is_empty_and_undrain_takes_it_back() -> None:
    async with system() as one:
        request = generation_pb2.GenerateRequest(spec=generation_spec_to_pb(long_spec(20_000)), session_id="moves")
        call = one.client.generation.Generate(request, timeout=2 * TIMEOUT_S)
        await read_until_tokens(call, 2)
        reading = asyncio.create_task(drained(call))

        async def verifier() -> str:
            return next(view.endpoint for view in (await one.client.cluster()).endpoints[1:3] if view.num_own_sessions)

        leaving = await verifier()
        order = await one.specdec("drain", leaving)
        assert order.code == 0
        assert order.lines[-1] == f"{leaving} is empty"
        assert any("other orchestrators do not see this" in line for line in order.lines)  # an embedded store
        assert await eventually(verifier) != leaving
        assert [line.split()[2] for line in (await one.specdec("ps")).lines if leaving in line] == ["drained"]
        stuck = await one.specdec("drain", await verifier(), "--timeout", "0")  # no other is left
        assert stuck.code == 1
        assert "1 session left" in stuck.errors
        assert (await one.specdec("undrain", leaving)).lines[0] == f"{leaving} gets new sessions again"
        unknown = await one.specdec("drain", "10.0.0.1:1")
        assert (unknown.code, unknown.errors.count("\n")) == (2, 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_an_orchestrator_that_is_not_there_is_told_in_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli.main", "ps", "--endpoint", "127.0.0.1:9"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        _, faults = await process.communicate()
    assert (process.returncode, faults) == (1, b"error: no server answers at 127.0.0.1:9 (PEER_UNAVAILABLE)\n")


async def test_an_operators_token_lets_the_commands_in_and_no_other_does(tmp_path: Path) -> None:
    tokens = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": "team-a", "scopes": scopes}
        for name, scopes in (("operators-own", ["admin"]), ("of-a-client", []))
    ]
    known = tmp_path / "tokens.json"
    known.write_text(json.dumps({"tokens": tokens}))
    async with served_verifier(FakeVerifier()) as verifier, orchestrator([verifier], auth_tokens=known) as client:
        one = System(client, [verifier], "")
        for token, reason in (("", "UNAUTHENTICATED"), ("of-a-client", "PERMISSION_DENIED")):
            refused = await one.specdec("ps", *(("--token", token) if token else ()))
            assert refused.code == 1
            assert reason in refused.errors
        held = tmp_path / "token"
        held.write_text("operators-own\n")
        shown = await one.specdec("ps", "--token-file", str(held))
        assert shown.code == 0
        assert shown.lines[1].split()[0] == "orchestrator"
