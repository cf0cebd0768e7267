"""An orchestrator in this process, and a client of it over real gRPC."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from orchestrator.main import serve_until
from specdec.config import OrchestratorSettings
from specdec.errors import SpecdecError
from specdec.messages import Delta, Finished, GenerationEvent, Started
from specdec.params import GenerationSpec
from specdec.v1 import admin_pb2, generation_pb2
from specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.v1.generation_pb2_grpc import GenerationServiceStub
from specdec.wire.channel import open_channel
from specdec.wire.convert import generation_event_from_pb, generation_spec_to_pb
from specdec.wire.interceptors import error_from_rpc

DEADLINE_S = 15.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Answer:
    """What a client has of one output."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: Finished | None = None

    def add(self, frame: GenerationEvent) -> None:
        match frame:
            case Started():
                assert self.started is None
                self.started = frame
            case Delta():
                assert self.started is not None
                assert frame.position == self.started.num_prompt_tokens + len(self.token_ids)
                self.token_ids += frame.token_ids
                self.text += frame.text
            case Finished():
                self.finished = frame
                self.text += frame.text


class Client:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = open_channel(endpoint)
        self.generation = GenerationServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)

    def call(self, spec: GenerationSpec, session_id: str = "") -> Any:
        """The running call; iterate it with `frames`."""
        request = generation_pb2.GenerateRequest(spec=generation_spec_to_pb(spec), session_id=session_id)
        return self.generation.Generate(request, timeout=DEADLINE_S)

    async def generate(self, spec: GenerationSpec, session_id: str = "") -> Answer:
        """The whole output; raises the server's error."""
        answer = Answer()
        async for frame in frames(self.call(spec, session_id)):
            answer.add(frame)
        return answer

    async def resume(self, session_id: str, received: Sequence[int], spec: GenerationSpec | None = None) -> Answer:
        """The whole output, what was received before included."""
        request = generation_pb2.ResumeRequest(session_id=session_id, received_token_ids=received)
        if spec is not None:
            request.spec.CopyFrom(generation_spec_to_pb(spec))
        answer = Answer()
        async for frame in frames(self.generation.Resume(request, timeout=DEADLINE_S)):
            answer.add(frame)
            if isinstance(frame, Started):
                answer.token_ids = list(received)
        return answer

    async def cancel(self, session_id: str) -> bool:
        request = generation_pb2.CancelRequest(session_id=session_id)
        try:
            return bool((await self.generation.Cancel(request, timeout=DEADLINE_S)).found)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def session_ids(self) -> list[str]:
        response = await self.admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=DEADLINE_S)
        return [summary.session_id for summary in response.sessions]

    async def cluster(self) -> admin_pb2.ClusterStatus:
        response = await self.admin.GetClusterStatus(admin_pb2.GetClusterStatusRequest(), timeout=DEADLINE_S)
        return response.status


async def frames(call: Any) -> AsyncIterator[GenerationEvent]:
    """The frames of Generate or Resume, errors as the server raised them."""
    try:
        async for response in call:
            yield generation_event_from_pb(response.event)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def read_until_tokens(call: Any, num_tokens: int, answer: Answer | None = None) -> Answer:
    """Reads until there are that many output tokens at least, on from `answer`, and leaves the call running."""
    answer = answer or Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames(call):
            answer.add(frame)
            if len(answer.token_ids) >= num_tokens:
                break
    return answer


@contextlib.asynccontextmanager
async def orchestrator(
    verifiers: Sequence[str], drafters: Sequence[str] = (), **settings: Any
) -> AsyncIterator[Client]:
    """A client of an orchestrator that serves; leaving drains it."""
    options = {"health_interval_s": 0.2, "drain_grace_s": 0.5, **settings}
    stopping, endpoints = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(
        serve_until(
            stopping,
            OrchestratorSettings(verifiers=tuple(verifiers), drafters=tuple(drafters), **options),
            endpoints.put_nowait,
        )
    )
    ready = asyncio.create_task(endpoints.get())
    await asyncio.wait({serving, ready}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    client = Client(ready.result())
    try:
        yield client
    finally:
        await client.channel.close()
        stopping.set()
        async with asyncio.timeout(DEADLINE_S):
            await serving


async def error_of(awaitable: Any) -> SpecdecError:
    """The error that it ends with."""
    try:
        await awaitable
    except SpecdecError as error:
        return error
    raise AssertionError("no error")
