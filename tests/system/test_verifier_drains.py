"""A verifier process that is told to end while it serves sessions."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import pytest

from specdec.cli.role_process import RoleCommand, RoleProcess
from specdec.errors import DrainingError
from specdec.v1 import common_pb2
from specdec.v1 import verifier_pb2 as pb
from specdec.wire.interceptors import error_from_rpc
from tests.system.hand_drafter import DEADLINE_S, HandDrafter, HandSession, verifier_stub

START_TIMEOUT_S = 120.0
GRACE_S = 2.0
MODEL = "synthetic:seed=1,forward_ms=20"
LONG = common_pb2.GenerationSpec(
    text="abc",
    sampling=common_pb2.SamplingParameters(temperature=0.0),
    stop=common_pb2.StopCriteria(max_new_tokens=1000, ignore_end_of_sequence=True),
)


async def until_draining(session: HandSession) -> None:
    while await session.read() != "draining":
        pass


async def refusal_of(session: HandSession) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await session.read_to_end()
    return error_from_rpc(refused.value)


async def test_sigterm_tells_every_owner_and_drafter_serves_on_and_ends_with_0_when_the_grace_is_over(
    tmp_path: Path,
) -> None:
    options = ("--model", MODEL, "--drain-grace-s", str(GRACE_S), "--max-sessions", "2")
    command = RoleCommand("verifier", (sys.executable, "-m", "specdec.cli.main", "verifier", *options))
    process = RoleProcess(command, tmp_path / "verifier.log", lambda _name, _line: None)
    await process.start()
    try:
        await process.wait_for_event("serving", START_TIMEOUT_S)
        channel, stub = verifier_stub((await process.wait_for_event("listening", START_TIMEOUT_S))["endpoint"])
        async with channel:
            stays, leaves, waits = (HandSession(stub, LONG) for _ in range(3))
            for session in (stays, leaves, waits):
                await session.open()
            drafter = HandDrafter(stub)
            drafter.attach(stays)
            await drafter.answer("attached")
            os.kill(process.pid, signal.SIGTERM)
            for session in (stays, leaves, waits):
                await asyncio.wait_for(until_draining(session), DEADLINE_S)
            assert isinstance(await refusal_of(HandSession(stub, LONG)), DrainingError)
            num_tokens = len(stays.token_ids)
            leaves.leave()
            waits.leave()
            assert isinstance(await refusal_of(stays), DrainingError)
            assert len(stays.token_ids) > num_tokens
            assert (await drafter.answer("detached")).reason == pb.DETACH_REASON_SESSION_ENDED
        await asyncio.wait_for(process.wait_for_death(), DEADLINE_S)
        assert process.exit_code == 0
    finally:
        await process.stop(0.0)
