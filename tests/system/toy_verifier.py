"""The real servicer, engine and device thread, over real gRPC, before a target that is a hash of the prefix."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import grpc.aio

from specdec.config import WireSettings
from specdec.messages import ModelInfo, SelfCheck
from specdec.params import Prompt, prompt_token_ids
from specdec.v1 import verifier_pb2
from specdec.v1.verifier_pb2_grpc import VerifierServiceStub, add_VerifierServiceServicer_to_server
from specdec.wire.channel import open_channel
from specdec.wire.server import GrpcServer
from tests.unit.verifier_service.harness import CountingObserver, HashRunner, LetterTokenizer
from verifier_service.admission import EngineLimits
from verifier_service.device_thread import DeviceThread
from verifier_service.engine import Engine
from verifier_service.scheduler import SchedulerPolicy
from verifier_service.servicer import VerifierServicer
from verifier_service.target import Target

STOP_S = 5.0
ON_DEVICE_TIMEOUT_S = 30.0

T = TypeVar("T")


class ToyTokenizer(LetterTokenizer):
    """Takes prompts of token ids, and texts of letters: "a" is 1."""

    def require_short_enough(self, prompt: Prompt, context_limit: int) -> None: ...

    def encode_prompt(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return [ord(letter) - ord("a") + 1 for letter in prompt]
        return prompt_token_ids(prompt) or ()


@dataclasses.dataclass
class ToyVerifier:
    endpoint: str
    stub: VerifierServiceStub
    servicer: VerifierServicer
    runner: HashRunner
    engine: Engine
    device: DeviceThread
    observer: CountingObserver

    async def on_device(self, function: Callable[[], T]) -> T:
        """What a function returns that the device's thread calls between two steps."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def call() -> None:
            try:
                result = function()
            except Exception as error:
                self.device.post(lambda error=error: done.set_exception(error))
            else:
                self.device.post(lambda: done.set_result(result))

        self.device.submit(call)
        return await asyncio.wait_for(done, ON_DEVICE_TIMEOUT_S)


@contextlib.asynccontextmanager
async def toy_verifier(
    *,
    forward_time_s: float = 0.0,
    kept_tokens_grace_s: float = 30.0,
    max_sessions: int = 16,
    max_attachments_per_stream: int = 16,
    max_verify_streams_per_peer: int = 16,
    wire: WireSettings | None = None,
    add_to_server: Callable[[VerifierServicer, grpc.aio.Server], None] = add_VerifierServiceServicer_to_server,
) -> AsyncIterator[ToyVerifier]:
    """Serving from the start, on loopback.

    Args:
        forward_time_s: what a forward takes at least.
        add_to_server: puts the servicer on the wire.
    """
    runner, tokenizer = HashRunner(num_blocks=512, context_limit=1024), ToyTokenizer()
    runner.on_forward = lambda num_rows: time.sleep(forward_time_s)
    observer = CountingObserver()
    engine = Engine(
        "toy",
        runner,
        tokenizer,
        SchedulerPolicy(max_step_rows=64, max_draft_tokens=8, draft_wait_s=0.05),
        EngineLimits(
            max_sessions,
            64,
            1000,
            kept_tokens_grace_s=kept_tokens_grace_s,
            max_attachments_per_stream=max_attachments_per_stream,
        ),
        observer,
        time.monotonic,
    )
    device = DeviceThread(engine.step, asyncio.get_running_loop())
    servicer = VerifierServicer(max_verify_streams_per_peer)
    info = ModelInfo("toy", runner.vocabulary_size, runner.context_limit, tokenizer.fingerprint, runner.numerics)
    servicer.target = Target(info, SelfCheck(True, 1, (1,), 0, "", 0.0), tokenizer, engine, device)
    server = GrpcServer("127.0.0.1:0", wire=wire)
    server.add(add_to_server, servicer, verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"])
    endpoint = await server.start()
    await server.set_serving()
    device.start()
    try:
        async with open_channel(endpoint) as channel:
            yield ToyVerifier(endpoint, VerifierServiceStub(channel), servicer, runner, engine, device, observer)
    finally:
        servicer.end_verify_streams()
        await server.stop(0.0)
        await device.stop(STOP_S)
