"""How a verifier's stream is read, and how it is given up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from orchestrator.peers import VerifierPeer
from specdec.config import WireSettings
from specdec.ids import Epoch, SessionId
from specdec.messages import OpenSession
from specdec.params import GenerationSpec

REQUEST = OpenSession(SessionId("s"), Epoch(1), b"n" * 16, GenerationSpec(prompt="hello"))


class SilentCall:
    """Has no message; a read ends when the call is cancelled, as gRPC's do."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.reading = asyncio.Event()
        self.read_ended = asyncio.Event()

    async def read(self) -> Any:
        self.reading.set()
        await self.cancelled.wait()
        self.read_ended.set()
        return grpc.aio.EOF

    def cancel(self) -> bool:
        self.cancelled.set()
        return True


async def test_whoever_gives_up_a_stream_cancels_the_call_and_never_the_read_which_grpc_would_not_free() -> None:
    call = SilentCall()
    peer = VerifierPeer("127.0.0.1:1", WireSettings())
    peer._stub = lambda: SimpleNamespace(OpenSession=lambda request, timeout: call)  # type: ignore[assignment,method-assign,return-value]

    async def first_event() -> object:
        return await anext(peer.open_session(REQUEST))

    waiting = asyncio.create_task(first_event())
    await call.reading.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled.is_set()
    async with asyncio.timeout(1.0):
        await call.read_ended.wait()
    await peer.close()
