"""An orchestrator in this process, and a client of it over real gRPC."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from orchestrator.main import serve_until
from orchestrator.record import RecordState, SessionRecord
from orchestrator.session_store import SessionStore
from specdec.config import OrchestratorSettings
from specdec.errors import SpecdecError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, PositionLogprobs, PromptLogprobs, Started
from specdec.params import GenerationSpec, StopCriteria
from specdec.v1 import admin_pb2, generation_pb2
from specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.v1.generation_pb2_grpc import GenerationServiceStub
from specdec.wire.channel import open_channel
from specdec.wire.convert import generation_event_from_pb, generation_spec_to_pb
from specdec.wire.interceptors import error_from_rpc
from specdec.wire.tenant import tenant_to_metadata
from tests.system.fakes import expected_output, tokenise

DEADLINE_S = 15.0
PROMPT = "hello"
OUTPUT = expected_output(tokenise(PROMPT), 24)
SPEC = GenerationSpec(prompt=PROMPT)
SLOW_S = 0.05


def long_spec(max_new_tokens: int = 2000) -> GenerationSpec:
    return dataclasses.replace(SPEC, stop=StopCriteria(max_new_tokens=max_new_tokens))


class Answer:
    """What a client has of one output, or of one of several samples."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.logprobs: list[PositionLogprobs] = []
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
                self.logprobs += frame.logprobs
            case PromptLogprobs():
                assert frame.start_position == 1 + len(self.prompt_logprobs)
                self.prompt_logprobs += frame.logprobs
            case Finished():
                assert self.finished is None
                self.finished = frame
                self.text += frame.text


class Samples:
    """What a client has of several samples: `answers` in order."""

    def __init__(self, num_samples: int) -> None:
        self.answers = [Answer() for _ in range(num_samples)]

    def add(self, frame: GenerationEvent) -> None:
        match frame:
            case Started():
                for answer in self.answers:
                    answer.add(frame)
            case PromptLogprobs():
                self.answers[0].add(frame)
            case _:
                self.answers[frame.sample_index].add(frame)

    @property
    def num_finished(self) -> int:
        return sum(answer.finished is not None for answer in self.answers)


class Client:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = open_channel(endpoint)
        self.generation = GenerationServiceStub(self.channel)
        self.admin = AdminServiceStub(self.channel)

    def call(self, spec: GenerationSpec, session_id: str = "", tenant: str = "", timeout_s: float = DEADLINE_S) -> Any:
        """The running call; iterate it with `frames`."""
        request = generation_pb2.GenerateRequest(spec=generation_spec_to_pb(spec), session_id=session_id)
        return self.generation.Generate(request, timeout=timeout_s, metadata=tenant_to_metadata(tenant))

    async def generate(self, spec: GenerationSpec, session_id: str = "", tenant: str = "") -> Answer:
        """The whole output; raises the server's error."""
        answer = Answer()
        async for frame in frames(self.call(spec, session_id, tenant)):
            answer.add(frame)
        return answer

    async def resume(
        self, session_id: str, received: Sequence[int], spec: GenerationSpec | None = None, tenant: str = ""
    ) -> Answer:
        """The whole output, what was received before included."""
        request = generation_pb2.ResumeRequest(session_id=session_id, received_token_ids=received)
        if spec is not None:
            request.spec.CopyFrom(generation_spec_to_pb(spec))
        answer = Answer()
        call = self.generation.Resume(request, timeout=DEADLINE_S, metadata=tenant_to_metadata(tenant))
        async for frame in frames(call):
            answer.add(frame)
            if isinstance(frame, Started):
                answer.token_ids = list(received)
        return answer

    async def cancel(self, session_id: str, tenant: str = "") -> bool:
        request = generation_pb2.CancelRequest(session_id=session_id)
        try:
            metadata = tenant_to_metadata(tenant)
            return bool((await self.generation.Cancel(request, timeout=DEADLINE_S, metadata=metadata)).found)
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


async def all_samples(call: Any, num_samples: int) -> Samples:
    """Every sample to its end; raises the server's error."""
    samples = Samples(num_samples)
    async for frame in frames(call):
        samples.add(frame)
    return samples


async def read_until_all_have_tokens(call: Any, num_samples: int, num_tokens: int = 2) -> Samples:
    """Reads until every sample has that many tokens at least, and leaves the call running."""
    samples = Samples(num_samples)
    async with asyncio.timeout(DEADLINE_S):
        async for frame in frames(call):
            samples.add(frame)
            if all(len(answer.token_ids) >= num_tokens for answer in samples.answers):
                break
    return samples


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


async def drained(call: Any) -> None:
    """Reads the call to its end."""
    async for _ in frames(call):
        pass


async def eventually(look: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    """Its first true answer."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await look()):  # noqa: ASYNC110 - what is looked at sets no event of ours
            await asyncio.sleep(0.02)
    return answer


async def routed(client: Client, num_healthy: int = 2) -> None:
    """Until so many servers are healthy, the orchestrator included."""

    async def enough() -> bool:
        return sum(endpoint.healthy for endpoint in (await client.cluster()).endpoints) >= num_healthy

    await eventually(enough)


async def nothing_running(client: Client) -> None:
    async def idle() -> bool:
        return await client.session_ids() == []

    await eventually(idle)


async def record_in(store: SessionStore, session_id: str, state: RecordState) -> SessionRecord:
    async def look() -> SessionRecord | None:
        record = await store.read(SessionId(session_id))
        return record if record is not None and record.state is state else None

    found = await eventually(look)
    assert isinstance(found, SessionRecord)
    return found
