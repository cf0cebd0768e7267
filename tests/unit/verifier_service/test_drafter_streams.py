"""A drafter's stream at the servicer, with messages that cannot be read."""

import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdec.v1 import verifier_pb2 as pb
from verifier_service.servicer import VerifierServicer
from verifier_service.target import Target


def _target() -> Target:
    """Whatever is handed to its device's thread is done at once."""
    device = SimpleNamespace(
        sink=lambda mailbox: mailbox.put,
        submit=lambda command: command(),
        submit_release=lambda command: command(),
        post=lambda command: command(),
    )
    drafters = SimpleNamespace(receive=lambda *_: None, stream_broken=lambda _: None)
    return cast(Target, SimpleNamespace(device=device, engine=SimpleNamespace(drafters=drafters)))


async def _garbage(number: int) -> AsyncIterator[pb.VerifyRequest]:
    for _ in range(number):
        yield pb.VerifyRequest(session_id="no such name", draft=pb.Draft(draft_sequence=-1))


async def test_a_drafter_fills_no_log_with_messages_that_make_no_sense_though_each_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer = VerifierServicer(max_verify_streams_per_peer=1)
    servicer.target = _target()
    context = cast(Any, SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1"))
    with caplog.at_level(logging.INFO):
        answers = [answer async for answer in servicer.Verify(_garbage(100), context)]
    assert [answer.WhichOneof("message") for answer in answers] == ["refused"] * 100
    assert len(caplog.records) == 1
