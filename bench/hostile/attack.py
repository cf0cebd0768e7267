"""Hostile messages to one service: every method, every shape of message, as fast as a few callers can send them.

Knows services by their descriptors and what may be answered: a status with a reason, never INTERNAL or UNKNOWN. Refuses
to know what an honest session is.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bench.hostile.messages import hostile_bytes, hostile_message, with_hostile_fields

NUM_CALLERS = 32
CALL_TIMEOUT_S = 1.0
"""Of a call that a server took and does not answer soon."""
MAX_RESPONSES = 2
"""Of a stream that a server took; then the caller leaves, which is hostile too."""
MESSAGES_PER_STREAM = 20
LOST_STATUS = "Internal error from Core"
"""What grpc says here, and no server, where a call ended while it was written to."""
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Target:
    """One service of a server. `sound` holds requests of honest peers, `likely` values for fields by name."""

    endpoint: str
    service: ServiceDescriptor
    sound: Sequence[Message]
    likely: Mapping[str, Sequence[Any]]


class Attack:
    """Sends `num_messages` to a target. `answers` counts status codes by method; `faults` tells of what must not be."""

    def __init__(self, target: Target, num_messages: int, seed: int) -> None:
        self._target = target
        self._num_left = num_messages
        self._seed = seed
        self.num_sent = 0
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []

    async def run(self) -> None:
        """Returns when all are sent and each call has ended or was left."""
        async with grpc.aio.insecure_channel(self._target.endpoint) as channel, asyncio.TaskGroup() as group:
            for number in range(NUM_CALLERS):
                group.create_task(self._call_on(channel, random.Random(f"{self._seed} {number}")))  # noqa: S311

    async def _call_on(self, channel: grpc.aio.Channel, choice: random.Random) -> None:
        while self._num_left > 0:
            method = choice.choice(self._target.service.methods)
            num_messages = min(self._num_left, MESSAGES_PER_STREAM if method.client_streaming else 1)
            self._num_left -= num_messages
            requests = [self._request(choice, method) for _ in range(num_messages)]
            code, details = await _answer(channel, method, requests)
            self.num_sent += num_messages
            self.answers[f"{method.name} {code.name}"] += 1
            if code in FAULTS and details != LOST_STATUS:
                self.faults.append(f"{method.name} {code.name}: {details}; request {requests[-1].hex()}")

    def _request(self, choice: random.Random, method: MethodDescriptor) -> bytes:
        message_class = GetMessageClass(method.input_type)
        sound = [message for message in self._target.sound if isinstance(message, message_class)]
        if sound and choice.random() < 0.6:
            message = with_hostile_fields(choice, choice.choice(sound), choice.randrange(4))
        else:
            message = hostile_message(choice, message_class, self._target.likely)
        serialized = message.SerializeToString()
        garbage_share = 0.02 if method.client_streaming else 0.3  # garbage ends a stream
        return hostile_bytes(choice, serialized) if choice.random() < garbage_share else serialized


async def _answer(
    channel: grpc.aio.Channel, method: MethodDescriptor, requests: Sequence[bytes]
) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call; CANCELLED where the caller left."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            return await _answer_to_all(channel.stream_stream(path)(timeout=CALL_TIMEOUT_S), requests)
        if not method.server_streaming:
            await channel.unary_unary(path)(requests[0], timeout=CALL_TIMEOUT_S)
            return grpc.StatusCode.OK, ""
        call = channel.unary_stream(path)(requests[0], timeout=CALL_TIMEOUT_S)
        try:
            for _ in range(MAX_RESPONSES):
                if await call.read() is grpc.aio.EOF:
                    return await call.code(), await call.details()
            return grpc.StatusCode.CANCELLED, "left"
        finally:
            call.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


async def _answer_to_all(call: Any, requests: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """Status and details of a stream in both directions, once the server has read all and ended it, or sooner."""
    try:
        with contextlib.suppress(asyncio.InvalidStateError):  # the server ended the call before it had read all
            for request in requests:
                await call.write(request)
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        return await call.code(), await call.details()
    finally:
        call.cancel()
