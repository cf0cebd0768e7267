"""A session and a drafter that a test plays by hand against a real verifier, over the wire."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from specdec import PROTOCOL_VERSION
from specdec.attach_key import attach_key
from specdec.ids import AttachmentId
from specdec.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specdec.wire.channel import open_channel

DEADLINE_S = 30.0


class HandSession:
    """Owns one session at a verifier, as an orchestrator would."""

    def __init__(
        self,
        stub: verifier_pb2_grpc.VerifierServiceStub,
        spec: common_pb2.GenerationSpec,
        epoch: int = 1,
        **fields: Any,
    ) -> None:
        self.session_id = secrets.token_hex(8)
        self.epoch = epoch
        request = verifier_pb2.OpenSessionRequest(
            session_id=self.session_id, epoch=epoch, owner_nonce=secrets.token_bytes(16), spec=spec, **fields
        )
        self._call = stub.OpenSession(request, timeout=DEADLINE_S)
        self.opened: verifier_pb2.Opened | None = None
        self.finished: verifier_pb2.SessionFinished | None = None
        self.token_ids: list[int] = []
        self.changes: list[verifier_pb2.AttachmentChange] = []

    async def open(self) -> verifier_pb2.Opened:
        response = await self._call.read()
        self.opened = response.event.opened
        return self.opened

    async def read(self) -> str:
        """The kind of the next event."""
        event = (await self._call.read()).event
        kind = event.WhichOneof("event")
        if kind == "commit":
            self.token_ids += event.commit.token_ids
        elif kind == "finished":
            self.finished = event.finished
        elif kind == "attachment_change":
            self.changes.append(event.attachment_change)
        return kind

    async def read_to_end(self) -> list[int]:
        while self.finished is None:
            await self.read()
        return self.token_ids

    def leave(self) -> None:
        self._call.cancel()


class HandDrafter:
    """One Verify stream; `send` and `answer` are as raw as the wire."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceStub) -> None:
        self._outbox: asyncio.Queue[verifier_pb2.VerifyRequest | None] = asyncio.Queue()
        self._call = stub.Verify(self._requests(), timeout=DEADLINE_S)
        self._sequence = 0

    async def _requests(self) -> AsyncIterator[verifier_pb2.VerifyRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request

    def send(self, session: HandSession, attachment_id: int = 1, **message: Any) -> None:
        self._outbox.put_nowait(
            verifier_pb2.VerifyRequest(session_id=session.session_id, attachment_id=attachment_id, **message)
        )

    async def answer(self, *kinds: str) -> Any:
        """The next response of one of these kinds, or of any kind; others are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                response = await self._call.read()
                kind = response.WhichOneof("message")
                if not kinds or kind in kinds:
                    return getattr(response, kind)

    def attach(self, session: HandSession, attachment_id: int = 1, **changes: Any) -> None:
        secret = session.opened.attach_secret if session.opened else b""
        key = attach_key(secret, AttachmentId(attachment_id))
        fields = {
            "epoch": session.epoch,
            "attach_key": key,
            "known_digest": hashlib.sha256(b"").digest(),
            "protocol_version": PROTOCOL_VERSION,
        }
        self.send(session, attachment_id, attach=verifier_pb2.Attach(**{**fields, **changes}))

    def draft(self, session: HandSession, token_ids: Sequence[int], start: int, attachment_id: int = 1, **changes: Any):
        self._sequence += 1
        fields = {
            "epoch": session.epoch,
            "draft_sequence": self._sequence,
            "start_position": start,
            "draft_token_ids": token_ids,
        }
        self.send(session, attachment_id, draft=verifier_pb2.Draft(**{**fields, **changes}))
        return self._sequence

    def end(self) -> None:
        self._outbox.put_nowait(None)

    def vanish(self) -> None:
        self._call.cancel()


def verifier_stub(endpoint: str) -> tuple[Any, verifier_pb2_grpc.VerifierServiceStub]:
    """A channel, to be closed, and a stub on it."""
    channel = open_channel(endpoint)
    return channel, verifier_pb2_grpc.VerifierServiceStub(channel)
