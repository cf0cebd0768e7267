"""A verifier without a model that binds a session to (epoch, nonce), as the real one does, and ends whom it fences."""

import contextlib
from collections.abc import AsyncIterator

from specdec.ids import Epoch
from specdec.messages import Fenced
from specdec.v1 import verifier_pb2
from specdec.wire.convert import open_session_from_pb, session_event_to_pb
from tests.system.fakes import Context, FakeVerifier


class FencingVerifier(FakeVerifier):
    def __init__(self, *, round_s: float = 0.0) -> None:
        super().__init__(round_s=round_s)
        self.owners: dict[str, tuple[Epoch, bytes]] = {}

    async def OpenSession(
        self, request: verifier_pb2.OpenSessionRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.OpenSessionResponse]:
        command = open_session_from_pb(request)
        epoch, nonce = self.owners.get(command.session_id, (Epoch(0), b""))
        if command.epoch < epoch or (command.epoch == epoch and command.owner_nonce != nonce):
            yield verifier_pb2.OpenSessionResponse(event=session_event_to_pb(Fenced(epoch)))
            return
        self.owners[command.session_id] = (command.epoch, command.owner_nonce)
        for session in self.sessions:
            if session.request.session_id == command.session_id:
                session.injected.put_nowait(Fenced(command.epoch))
        async with contextlib.aclosing(super().OpenSession(request, context)) as responses:
            async for response in responses:
                yield response
