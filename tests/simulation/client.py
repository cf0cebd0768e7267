"""A client as one would write it: generate, and resume elsewhere whenever the stream breaks.

Checks all that it is told.
"""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio

from specdec.errors import SpecdecError
from specdec.messages import Delta, Finished, Started
from specdec.params import AcceptanceRule, FinishReason
from specdec.v1 import generation_pb2 as pb
from specdec.v1.generation_pb2_grpc import GenerationServiceStub
from specdec.wire.convert import generation_event_from_pb, generation_spec_to_pb
from specdec.wire.interceptors import error_from_rpc
from tests.simulation.faults import Request
from tests.simulation.rpc import ClientCall
from tests.simulation.target import SimTokenizer, undisturbed
from tests.simulation.virtual_time import Process

RETRY_S = 0.3
GIVE_UP_UNKNOWN_AFTER_S = 15.0
RETRIED = frozenset(
    {
        "NO_VERIFIER",
        "VERIFIER_LOST",
        "DRAINING",
        "LOADING",
        "STORE_UNAVAILABLE",
        "PEER_UNAVAILABLE",
        "FENCED",
        "OVERLOADED",
        "DEADLINE_EXCEEDED",
    }
)


class SimClient:
    """`run` ends when there is nothing more to come: `outcome` says why."""

    def __init__(self, world: Any, process: Process, request: Request, first_orchestrator: int) -> None:
        self._world, self._process, self.request = world, process, request
        self.session_id = process.name
        self._spec = request.spec()
        self._expected: tuple[int, ...] | None = None
        self._expected_text = ""
        if request.rule is not AcceptanceRule.ONE_HOT:
            self._expected, self._expected_text = undisturbed(request)
        self.received: list[int] = []
        self.text = ""
        self.outcome = ""
        self.num_streams = 0
        self._was_started = False
        self._has_left = False
        self._was_cancelled = False
        self._unknown_since: float | None = None
        self._next_orchestrator = first_orchestrator
        self._call: ClientCall | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tokenizer = SimTokenizer()

    async def run(self) -> None:
        await asyncio.sleep(self.request.begins_s)
        is_new = True
        while not self.outcome:
            self._reading = asyncio.ensure_future(self._one_stream(is_new))
            try:
                await self._reading
                is_new = False
            except SpecdecError as error:
                is_new = self._judge(error, is_new)
            except asyncio.CancelledError:
                if not self._reading.cancelled():
                    raise
                is_new = False
            if not self.outcome and self._has_left:
                self.outcome = "left"
            if not self.outcome and self._was_cancelled:
                self.outcome = "cancelled"
            if not self.outcome:
                await asyncio.sleep(RETRY_S)

    # --- What a schedule does to it ----------------------------------------------------------------------------------

    def reconnect(self) -> None:
        """Closes its stream, as a client that has another idea, and resumes."""
        if self._call is not None:
            self._call.cancel()
        self.forget()

    def forget(self) -> None:
        """Resumes without a word to whoever streams now."""
        if self._reading is not None:
            self._reading.cancel()

    def leave(self) -> None:
        self._has_left = True
        self.reconnect()

    async def cancel(self) -> None:
        """Asks any orchestrator for it; whatever it answers, the client asks for no more tokens."""
        stub = self._stub()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Cancel(pb.CancelRequest(session_id=self.session_id), timeout=5.0)
        self._was_cancelled = True

    # --- Streams -----------------------------------------------------------------------------------------------------

    def _stub(self) -> GenerationServiceStub:
        channel = self._world.channel(self._process, self._next_orchestrator)
        self._next_orchestrator += 1
        return GenerationServiceStub(channel)

    async def _one_stream(self, is_new: bool) -> None:
        stub = self._stub()
        self.num_streams += 1
        call: Any
        if is_new:
            call = stub.Generate(pb.GenerateRequest(spec=generation_spec_to_pb(self._spec), session_id=self.session_id))
        else:
            call = stub.Resume(pb.ResumeRequest(session_id=self.session_id, received_token_ids=self.received))
        self._call = call
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._take(generation_event_from_pb(response.event))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    def _judge(self, error: SpecdecError, was_new: bool) -> bool:
        """Notes the outcome where the error is the end; returns whether the next call is Generate."""
        reason, now = error.reason, self._world.loop.now
        self._world.note(f"{self.session_id} was told {reason}: {error.message}")
        if reason not in ("UNKNOWN_SESSION", "RESUME_MISMATCH"):
            self._unknown_since = None
        if reason == "SESSION_EXISTS" and was_new:
            return False
        if reason == "UNKNOWN_SESSION" and not was_new:
            if not self._was_started:
                return True
            if self._unknown_since is None:
                self._unknown_since = now
            if now - self._unknown_since > GIVE_UP_UNKNOWN_AFTER_S or self._was_cancelled:
                self.outcome = "cancelled" if self._was_cancelled else "unknown"
            return False
        if reason == "RESUME_MISMATCH":
            self.outcome = "mismatch"
        elif reason not in RETRIED:
            self._world.fail(f"{self.session_id} was told {reason}: {error.message}")
            self.outcome = "failed"
        return was_new and not self._was_started and reason != "DEADLINE_EXCEEDED"

    def _take(self, event: object) -> None:
        match event:
            case Started():
                self._was_started = True
                self._require(event.num_prompt_tokens == len(self.request.prompt), "another prompt")
            case Delta():
                self._take_delta(event)
            case Finished():
                self._take_end(event)
            case _:
                self._require(False, f"an unexpected {type(event).__name__}")

    def _take_delta(self, delta: Delta) -> None:
        position = len(self.request.prompt) + len(self.received)
        self._require(delta.position == position, f"tokens at {delta.position} where {position} comes next")
        self.received += delta.token_ids
        self.text += delta.text
        self._require_right()
        self._world.monitors.delivered(self.session_id, self.request.prompt + tuple(self.received))

    def _take_end(self, finished: Finished) -> None:
        self._require(not self.outcome, "two ends")
        self.text += finished.text
        self._require_right()
        if finished.reason is FinishReason.CANCELLED:
            self._require(self._was_cancelled or self._world.is_cancelling(self.session_id), "cancelled by nobody")
            self.outcome = "cancelled"
            return
        self.outcome = "finished"
        self._require(finished.usage.num_output_tokens == len(self.received), f"usage {finished.usage}")
        if self._expected is not None:
            self._require(tuple(self.received) == self._expected, "an output that is too short")
            self._require(self.text == self._expected_text, f"text {self.text!r}, not {self._expected_text!r}")
        else:
            whole = self._tokenizer.text(self.received)
            told = whole[: len(self.text)] if finished.reason is FinishReason.STOP_STRING else whole
            self._require(self.text == told, f"text {self.text!r}, not {told!r}")

    def _require_right(self) -> None:
        if self._expected is None:
            return
        expected = self._expected[: len(self.received)]
        self._require(tuple(self.received) == expected, f"tokens {self.received}, not {list(expected)}")
        self._require(self._expected_text.startswith(self.text), f"text {self.text!r}, not {self._expected_text!r}")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            self._world.fail(f"{self.session_id}: {message}")
