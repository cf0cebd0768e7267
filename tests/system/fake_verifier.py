"""The verifier's half of Verify without a model, to test drafters against: its target is a fixed text.

It answers every draft at once and keeps to the protocol; it can be told to refuse attaches, to go on alone or to end.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from specdec.ids import AttachmentId, Round, SessionId, common_prefix_length, digest_tokens
from specdec.messages import (
    Addressed,
    Advance,
    Attach,
    Attached,
    AttachRefusal,
    AttachRefused,
    Detach,
    Detached,
    DetachReason,
    Draft,
    Dropped,
    DropReason,
    Verdict,
    VerifierMessage,
)
from specdec.params import FinishReason
from specdec.v1 import verifier_pb2
from specdec.v1.verifier_pb2_grpc import VerifierServiceServicer, add_VerifierServiceServicer_to_server
from specdec.wire.convert import verify_request_from_pb, verify_response_to_pb
from specdec.wire.server import GrpcServer

Outbox = asyncio.Queue[Addressed | None]


@dataclasses.dataclass
class VerifiedSession:
    """What the target will say in all, and how much of it is committed. `round_s`: how long a round takes."""

    target_token_ids: Sequence[int]
    committed_length: int
    draft_budget: int = 8
    round_s: float = 0.0
    told_length: int = 0
    num_rounds: int = 0
    attachment: tuple[AttachmentId, Outbox] | None = None
    drafts: list[Draft] = dataclasses.field(default_factory=list)
    detached: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    finished: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def untold(self) -> tuple[int, ...]:
        token_ids = tuple(self.target_token_ids[self.told_length : self.committed_length])
        self.told_length = self.committed_length
        return token_ids

    def finish_reason(self) -> FinishReason | None:
        if self.committed_length < len(self.target_token_ids):
            return None
        self.finished.set()
        return FinishReason.LENGTH


class VerifySide(VerifierServiceServicer):
    """`sessions` by id; `refusal` answers every attach; `break_streams` ends all streams."""

    def __init__(self) -> None:
        self.sessions: dict[str, VerifiedSession] = {}
        self.refusal: AttachRefusal | None = None
        self.outboxes: set[Outbox] = set()

    async def start(self) -> tuple[GrpcServer, str]:
        server = GrpcServer("127.0.0.1:0")
        service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
        server.add(add_VerifierServiceServicer_to_server, self, service)
        return server, await server.start()

    async def Verify(
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        outbox: Outbox = asyncio.Queue()
        self.outboxes.add(outbox)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            while (addressed := await outbox.get()) is not None:
                yield verify_response_to_pb(addressed)
        finally:
            self.outboxes.discard(outbox)
            reader.cancel()

    async def _read(self, requests: AsyncIterator[verifier_pb2.VerifyRequest], outbox: Outbox) -> None:
        async for request in requests:
            addressed = verify_request_from_pb(request)
            session = self.sessions.get(addressed.session_id)
            if session is not None and isinstance(addressed.message, Draft):
                await asyncio.sleep(session.round_s)
            answer = self._answer(session, addressed, outbox)
            if answer is not None:
                outbox.put_nowait(dataclasses.replace(addressed, message=answer))
        outbox.put_nowait(None)

    def _answer(self, session: VerifiedSession | None, addressed: Addressed, outbox: Outbox) -> VerifierMessage | None:
        match addressed.message:
            case Attach() as attach:
                if session is None or self.refusal is not None:
                    return AttachRefused(self.refusal or AttachRefusal.UNKNOWN_SESSION, "refused by the test")
                session.attachment = (addressed.attachment_id, outbox)
                known = session.target_token_ids[: attach.known_length]
                session.told_length = attach.known_length if digest_tokens(known) == attach.known_digest else 0
                start = session.told_length
                return Attached(session.untold(), start, seed=None, draft_budget=session.draft_budget)
            case Draft() as draft if session is not None:
                session.drafts.append(draft)
                return verify(session, draft)
            case Detach() if session is not None:
                session.detached.set()
                return Detached(DetachReason.REQUESTED)
            case _:
                return None

    def go_on_alone(self, session_id: str, num_tokens: int) -> None:
        """Commits tokens without a draft."""
        session = self.sessions[session_id]
        base = session.committed_length
        session.committed_length += num_tokens
        session.num_rounds += 1
        assert session.attachment is not None
        attachment_id, outbox = session.attachment
        advance = Advance(
            Round(session.num_rounds),
            base,
            session.untold(),
            session.committed_length,
            session.draft_budget,
            session.finish_reason(),
        )
        outbox.put_nowait(Addressed(SessionId(session_id), attachment_id, advance))

    def break_streams(self) -> None:
        for outbox in tuple(self.outboxes):
            outbox.put_nowait(None)


def verify(session: VerifiedSession, draft: Draft) -> VerifierMessage:
    """One round: the draft's tokens that are the target's, and one more."""
    base = session.committed_length
    target = session.target_token_ids
    ahead = draft.draft_token_ids[base - draft.start_position :]
    right_head = common_prefix_length(draft.draft_token_ids, target[draft.start_position : base])
    if draft.start_position > base or (draft.draft_token_ids and right_head < base - draft.start_position):
        reason = DropReason.TOO_EARLY if draft.start_position > base else DropReason.HEAD_DIFFERS
        return Dropped(draft.draft_sequence, reason, base, session.untold(), session.draft_budget)
    num_accepted = common_prefix_length(ahead, target[base:])
    session.committed_length = min(len(target), base + num_accepted + 1)
    session.num_rounds += 1
    return Verdict(
        draft_sequence=draft.draft_sequence,
        round=Round(session.num_rounds),
        base_position=base,
        num_accepted_tokens=num_accepted,
        committed_token_ids=session.untold(),
        committed_length=session.committed_length,
        draft_budget=session.draft_budget,
        finish_reason=session.finish_reason(),
    )
