"""A verifier and a drafter without models that speak the protocol, to test what is around them over real gRPC."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from specdec import PROTOCOL_VERSION
from specdec.errors import NotOfferedError, SpecdecError
from specdec.ids import AttachmentId, Epoch, Round
from specdec.messages import (
    AttachmentChange,
    AttachmentState,
    AttachSession,
    Commit,
    DetachReason,
    Fenced,
    Load,
    ModelInfo,
    Numerics,
    Opened,
    OpenSession,
    PositionLogprobs,
    PromptLogprobs,
    RoundStatistics,
    ServerStatus,
    SessionEvent,
    SessionFinished,
    SpeculativeStatistics,
    TokenLogprob,
    Usage,
)
from specdec.params import FinishReason, NextTokenKind, prompt_token_ids
from specdec.v1 import drafter_pb2, verifier_pb2
from specdec.v1.drafter_pb2_grpc import DrafterServiceServicer, add_DrafterServiceServicer_to_server
from specdec.v1.verifier_pb2_grpc import VerifierServiceServicer, add_VerifierServiceServicer_to_server
from specdec.wire.convert import (
    attach_session_from_pb,
    open_session_from_pb,
    server_status_to_pb,
    session_event_to_pb,
)
from specdec.wire.server import GrpcServer

if TYPE_CHECKING:  # it brings torch
    from specdec.model.text import OutputText

Context = grpc.aio.ServicerContext[Any, Any]
Item = TypeVar("Item")
SECRET = b"s" * 32
VOCABULARY_SIZE = 1000
DEFAULT_MAX_NEW_TOKENS = 24


def tokenise(spec_prompt: Any) -> tuple[int, ...]:
    """One token a character of a text; token ids as they are."""
    ids = prompt_token_ids(spec_prompt)
    if ids is not None:
        return tuple(ids)
    text = spec_prompt if isinstance(spec_prompt, str) else "".join(turn.content for turn in spec_prompt)
    return tuple(ord(character) % VOCABULARY_SIZE for character in text)


def target_token(prompt: Sequence[int], position: int, sample_index: int = 0) -> int:
    """What this target says at a position: a function of prompt and sample alone, as coupled outputs are."""
    return (sum(prompt) * 31 + position * 7 + sample_index * 101) % VOCABULARY_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int, sample_index: int = 0) -> list[int]:
    return [target_token(prompt, len(prompt) + index, sample_index) for index in range(num_tokens)]


def expected_logprobs(token_ids: Sequence[int], num_alternatives: int) -> tuple[PositionLogprobs, ...]:
    """A logprob that tells which token it is of."""
    return tuple(
        PositionLogprobs(
            TokenLogprob(token_id, -token_id / 8),
            tuple(TokenLogprob(token_id + rank, -rank / 4) for rank in range(num_alternatives)),
        )
        for token_id in token_ids
    )


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


@dataclasses.dataclass
class FakeSession:
    request: OpenSession
    time_left_s: float | None
    injected: asyncio.Queue[SessionEvent | SpecdecError]
    closed: asyncio.Event
    num_rounds: int = 0
    num_draft_tokens: int = 0

    def statistics(self) -> SpeculativeStatistics:
        return SpeculativeStatistics(num_rounds=self.num_rounds, num_draft_tokens=self.num_draft_tokens)


class FakeVerifier(VerifierServiceServicer):
    """Commits `tokens_per_round` tokens every `round_s`. What is told with `inject` comes before the next round."""

    def __init__(self, model: str = "target", *, round_s: float = 0.0, tokens_per_round: int = 2) -> None:
        self.model = model
        self.round_s = round_s
        self.tokens_per_round = tokens_per_round
        self.padding = ""
        """Added to every commit's text."""
        self.load = Load()
        """What GetStatus tells."""
        self.refusal: SpecdecError | None = None
        self.refused_sample: int | None = None
        """Only this sample is refused with `refusal`; None: every session is."""
        self.numerics = "bits"
        self.make_text: Callable[[OpenSession], OutputText] | None = None
        """For a session whose text is not as long as its tokens are; else a token's text is its number."""
        self.num_kept_tokens = 0
        """Output beyond what is committed that it has from an earlier epoch, of every session that goes on."""
        self.failure: SpecdecError | None = None
        """How every session ends right after it was opened."""
        self.may_open, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_open.set()
        self.may_finish.set()
        self.highest_epoch: dict[str, int] = {}
        self.sessions: list[FakeSession] = []
        self.opened = asyncio.Condition()

    async def session(self, number: int = 0, timeout_s: float = 5.0) -> FakeSession:
        """The session that was opened as the number-th, once it is."""
        async with asyncio.timeout(timeout_s), self.opened:
            await self.opened.wait_for(lambda: len(self.sessions) > number)
        return self.sessions[number]

    async def OpenSession(
        self, request: verifier_pb2.OpenSessionRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.OpenSessionResponse]:
        command = open_session_from_pb(request)
        highest = self.highest_epoch.get(command.session_id, 0)
        if command.epoch <= highest:
            yield _response(Fenced(Epoch(highest)))
            return
        if self.refusal is not None and self.refused_sample in (None, command.sample_index):
            raise self.refusal
        self.highest_epoch[command.session_id] = command.epoch
        session = FakeSession(command, context.time_remaining(), asyncio.Queue(), asyncio.Event())
        async with self.opened:
            self.sessions.append(session)
            self.opened.notify_all()
        try:
            async for event in self._events(session):
                yield _response(event)
        finally:
            session.closed.set()

    async def _events(self, session: FakeSession) -> AsyncIterator[SessionEvent]:
        command = session.request
        prompt = command.committed_token_ids[: command.prompt_length] or tokenise(command.spec.prompt)
        committed = [*(() if command.prompt_length else prompt), *command.committed_token_ids]
        end = len(prompt) + (command.spec.stop.max_new_tokens or DEFAULT_MAX_NEW_TOKENS)
        rule = command.spec.sampling.rule
        text = self._output_text(command, committed[len(prompt) :])
        num_kept = min(self.num_kept_tokens, end - len(committed)) if command.committed_token_ids else 0
        kept = tuple(target_token(prompt, len(committed) + index, command.sample_index) for index in range(num_kept))
        committed += kept
        untold = text(kept)
        await self.may_open.wait()
        yield Opened(
            SECRET,
            tuple(prompt),
            rule,
            _numerics(self.numerics),
            self.model,
            end - len(prompt),
            kept_token_ids=kept,
            kept_epoch=Epoch(command.epoch - 1 if kept else 0),
        )
        if self.failure is not None:
            raise self.failure
        if command.spec.num_prompt_logprobs is not None:
            yield PromptLogprobs(1, expected_logprobs(prompt[1:], command.spec.num_prompt_logprobs))
        while len(committed) < end:
            event = await _within(session.injected, self.round_s)
            if isinstance(event, SpecdecError):
                raise event
            if event is not None:
                yield event  # outside the time limit, which would else cancel whoever sends it on
                continue
            num_tokens = min(self.tokens_per_round, end - len(committed))
            tokens = tuple(
                target_token(prompt, len(committed) + index, command.sample_index) for index in range(num_tokens)
            )
            logprobs = () if command.spec.num_logprobs is None else expected_logprobs(tokens, command.spec.num_logprobs)
            session.num_rounds += 1
            session.num_draft_tokens += num_tokens
            statistics = RoundStatistics(num_tokens, num_tokens - 1, NextTokenKind.RECOVERED, 0.01, 0.01, 0.0)
            certain, untold = untold + text(tokens) + self.padding, ""
            yield Commit(
                Round(session.num_rounds),
                len(committed),
                tokens,
                certain,
                statistics,
                len(committed),
                logprobs=logprobs,
            )
            committed += tokens
        await self.may_finish.wait()
        usage = Usage(len(prompt), len(committed) - len(prompt))
        yield SessionFinished(FinishReason.LENGTH, usage, session.statistics(), untold + text(None))

    def _output_text(
        self, command: OpenSession, told_token_ids: Sequence[int]
    ) -> Callable[[Sequence[int] | None], str]:
        """Takes tokens and tells what text is certain, behind that of tokens that were told; None: the rest."""
        if self.make_text is None:
            return lambda token_ids: text_of(token_ids or ())
        text = self.make_text(command)
        text.push(told_token_ids)
        return lambda token_ids: text.flush() if token_ids is None else text.push(token_ids).text

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        raise NotOfferedError("this verifier takes no drafts")
        yield  # an async generator, as the RPC wants

    async def GetStatus(
        self, request: verifier_pb2.VerifierServiceGetStatusRequest, context: Context
    ) -> verifier_pb2.VerifierServiceGetStatusResponse:
        model = ModelInfo(self.model, VOCABULARY_SIZE, 4096, "f" * 64, _numerics(self.numerics))
        status = ServerStatus(True, False, "0", PROTOCOL_VERSION, model=model, load=self.load)
        return verifier_pb2.VerifierServiceGetStatusResponse(status=server_status_to_pb(status))


class FakeDrafter(DrafterServiceServicer):
    """Joins whatever it is told to join, and guesses nothing."""

    def __init__(self) -> None:
        self.refusal: SpecdecError | None = None
        self.answers = asyncio.Event()
        """While it is not set, whoever asks for an attach waits."""
        self.answers.set()
        self.attached: list[AttachSession] = []
        self.times_left_s: list[float | None] = []
        """Of each of them, until the caller gives up."""
        self.told_to_leave: asyncio.Queue[str] = asyncio.Queue()
        """Sessions."""
        self.changed = asyncio.Condition()

    async def attachment(self, number: int = 0, timeout_s: float = 5.0) -> AttachSession:
        """The number-th session that this drafter was told to join, once it is."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: len(self.attached) > number)
        return self.attached[number]

    async def AttachSession(
        self, request: drafter_pb2.AttachSessionRequest, context: Context
    ) -> drafter_pb2.AttachSessionResponse:
        async with self.changed:
            self.attached.append(attach_session_from_pb(request))
            self.times_left_s.append(context.time_remaining())
            self.changed.notify_all()
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        return drafter_pb2.AttachSessionResponse()

    async def DetachSession(
        self, request: drafter_pb2.DetachSessionRequest, context: Context
    ) -> drafter_pb2.DetachSessionResponse:
        self.told_to_leave.put_nowait(request.session_id)
        return drafter_pb2.DetachSessionResponse(found=False)

    async def GetStatus(
        self, request: drafter_pb2.DrafterServiceGetStatusRequest, context: Context
    ) -> drafter_pb2.DrafterServiceGetStatusResponse:
        status = ServerStatus(True, False, "0", PROTOCOL_VERSION, proposer="ngram")
        return drafter_pb2.DrafterServiceGetStatusResponse(status=server_status_to_pb(status))


def detached(attachment_id: int) -> AttachmentChange:
    return AttachmentChange(
        AttachmentId(attachment_id), AttachmentState.DETACHED, detach_reason=DetachReason.STREAM_BROKEN
    )


@contextlib.asynccontextmanager
async def served_verifier(verifier: FakeVerifier, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Its endpoint while it serves; leaving breaks its streams."""
    service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
    server = GrpcServer(listen)
    server.add(add_VerifierServiceServicer_to_server, verifier, service)
    async with _serving(server) as endpoint:
        yield endpoint


@contextlib.asynccontextmanager
async def served_drafter(drafter: FakeDrafter, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Its endpoint while it serves."""
    service = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
    server = GrpcServer(listen)
    server.add(add_DrafterServiceServicer_to_server, drafter, service)
    async with _serving(server) as endpoint:
        yield endpoint


async def _within(queue: asyncio.Queue[Item], seconds: float) -> Item | None:
    """The next of the queue, or None after that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await queue.get()
    return None


@contextlib.asynccontextmanager
async def _serving(server: GrpcServer) -> AsyncIterator[str]:
    endpoint = await server.start()
    await server.set_serving()
    try:
        yield endpoint
    finally:
        await server.stop(0)


def _response(event: SessionEvent) -> verifier_pb2.OpenSessionResponse:
    return verifier_pb2.OpenSessionResponse(event=session_event_to_pb(event))


def _numerics(fingerprint: str) -> Numerics:
    return Numerics(fingerprint, "w", "float32", "float32", "cpu", "none", "none", "none")
