"""A drafter as a process, against a verifier that the test plays over real gRPC."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from specdec.cli.role_process import RoleCommand, RoleProcess
from specdec.errors import AttachRefusedError, InvalidParameterError, OverloadedError, PeerUnavailableError
from specdec.ids import Epoch
from specdec.messages import AttachRefusal, AttachSession
from specdec.v1 import drafter_pb2
from specdec.v1.drafter_pb2_grpc import DrafterServiceStub
from specdec.wire.channel import open_channel
from specdec.wire.convert import attach_session_to_pb, server_status_from_pb
from specdec.wire.interceptors import error_from_rpc
from tests.system.fake_verifier import VerifiedSession, VerifySide
from tests.unit.drafter_service.messages import attach_session

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

START_TIMEOUT_S = 120.0
DEADLINE_S = 30.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
TARGET = PROMPT * 6


class DrafterUnderTest:
    def __init__(self, process: RoleProcess, stub: "DrafterServiceStub") -> None:
        self.process = process
        self.stub = stub

    async def attach(self, request: AttachSession) -> None:
        try:
            await self.stub.AttachSession(attach_session_to_pb(request), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


async def start_drafter(tmp_path: Path, *arguments: str) -> RoleProcess:
    command = RoleCommand("drafter", (sys.executable, "-m", "specdec.cli.main", "drafter", *arguments))
    process = RoleProcess(command, tmp_path / "drafter.log", lambda _name, _line: None)
    await process.start()
    await process.wait_for_event("serving", START_TIMEOUT_S)
    return process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafter(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DrafterUnderTest]:
    process = await start_drafter(tmp_path_factory.mktemp("drafter"), "--proposer", "ngram", "--max-sessions", "3")
    endpoint = (await process.wait_for_event("listening", START_TIMEOUT_S))["endpoint"]
    async with open_channel(endpoint) as channel:
        yield DrafterUnderTest(process, DrafterServiceStub(channel))
    assert await process.stop(DEADLINE_S)
    assert process.exit_code == 0


@pytest_asyncio.fixture(loop_scope="module")
async def verifier() -> AsyncIterator[tuple[VerifySide, str]]:
    side = VerifySide()
    server, endpoint = await side.start()
    yield side, endpoint
    side.break_streams()
    await server.stop(0.0)


async def test_a_whole_output_is_drafted_and_nothing_but_the_target_is_committed(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT))
    await drafter.attach(attach_session(PROMPT, endpoint))
    await asyncio.wait_for(session.finished.wait(), DEADLINE_S)
    assert session.num_rounds < len(TARGET) - len(PROMPT)  # the text repeats: lookups were accepted
    assert any(draft.draft_token_ids for draft in session.drafts)
    assert [draft.draft_sequence for draft in session.drafts] == list(range(1, len(session.drafts) + 1))


async def test_a_drafter_without_a_guess_does_not_keep_the_verifier_waiting(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(list(range(30)), 10)
    await drafter.attach(attach_session(list(range(10)), endpoint))
    await asyncio.wait_for(session.finished.wait(), DEADLINE_S)
    assert all(not draft.draft_token_ids for draft in session.drafts)


async def test_tokens_committed_alone_are_followed(drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    await drafter.attach(attach_session(PROMPT, endpoint))
    side.go_on_alone("session", 3)
    session.draft_budget = 8
    side.go_on_alone("session", 2)
    await asyncio.wait_for(session.finished.wait(), DEADLINE_S)
    assert session.drafts[0].start_position >= len(PROMPT) + 5


async def test_a_refusal_is_named(drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]) -> None:
    side, endpoint = verifier
    side.refusal = AttachRefusal.TOKENIZER_MISMATCH
    with pytest.raises(AttachRefusedError) as refused:
        await drafter.attach(attach_session(PROMPT, endpoint))
    assert refused.value.metadata["refusal"] == "TOKENIZER_MISMATCH"


async def test_a_verifier_out_of_reach_is_told(drafter: DrafterUnderTest) -> None:
    with pytest.raises(PeerUnavailableError):
        await drafter.attach(attach_session(PROMPT, "127.0.0.1:9"))


async def test_a_detach_reaches_the_verifier_and_frees_the_place(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    request = attach_session(PROMPT, endpoint)
    await drafter.attach(request)
    with pytest.raises(InvalidParameterError):
        await drafter.attach(request)
    detach = drafter_pb2.DetachSessionRequest(session_id="session", attachment_id=1)
    assert (await drafter.stub.DetachSession(detach, timeout=DEADLINE_S)).found
    await asyncio.wait_for(session.detached.wait(), DEADLINE_S)
    assert not (await drafter.stub.DetachSession(detach, timeout=DEADLINE_S)).found


async def test_an_attachment_of_a_later_epoch_takes_the_place_of_an_earlier_one_at_any_verifier(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    old = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    other_side = VerifySide()
    other_server, other_endpoint = await other_side.start()
    other_side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    try:
        first = attach_session(PROMPT, endpoint)
        await drafter.attach(first)
        moved = dataclasses.replace(attach_session(PROMPT, other_endpoint), epoch=Epoch(2))
        await drafter.attach(moved)
        await asyncio.wait_for(old.detached.wait(), DEADLINE_S)
        # Another owner counts its attachments anew, and comes back to the first verifier.
        again = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT))
        await drafter.attach(dataclasses.replace(first, epoch=Epoch(3)))
        await asyncio.wait_for(other_side.sessions["session"].detached.wait(), DEADLINE_S)
        await asyncio.wait_for(again.finished.wait(), DEADLINE_S)
    finally:
        other_side.break_streams()
        await other_server.stop(0.0)


async def test_a_broken_stream_drops_its_attachments_and_the_session_can_be_joined_again(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    await drafter.attach(attach_session(PROMPT, endpoint))
    side.break_streams()
    await until_idle(drafter)
    session.draft_budget = 8
    await drafter.attach(attach_session(PROMPT, endpoint, attachment_id=2))
    await asyncio.wait_for(session.finished.wait(), DEADLINE_S)


async def test_sessions_beyond_the_limit_are_turned_away(
    drafter: DrafterUnderTest, verifier: tuple[VerifySide, str]
) -> None:
    side, endpoint = verifier
    side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    for attachment_id in (1, 2, 3):
        await drafter.attach(attach_session(PROMPT, endpoint, attachment_id))
    with pytest.raises(OverloadedError):
        await drafter.attach(attach_session(PROMPT, endpoint, attachment_id=4))
    side.break_streams()
    await until_idle(drafter)


async def until_idle(drafter: DrafterUnderTest) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            response = await drafter.stub.GetStatus(drafter_pb2.DrafterServiceGetStatusRequest(), timeout=DEADLINE_S)
            status = server_status_from_pb(response.status)
            if status.load.num_attachments == 0:
                return
            await asyncio.sleep(0.01)


async def test_a_lookup_drafter_never_imports_torch() -> None:
    program = (
        "import sys, drafter_service.main, drafter_service.proposers.registry as registry\n"
        "from specdec.config import DrafterSettings\n"
        "registry.create_proposer(DrafterSettings(proposer='ngram'))\n"
        "raise SystemExit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], timeout=DEADLINE_S, check=False)
    assert done.returncode == 0


async def test_a_draft_model_catches_up_with_a_long_prompt_and_then_guesses_like_the_target(
    tmp_path: Path, tiny_model_dir: Path, verifier: tuple[VerifySide, str]
) -> None:
    from specdec.model.loading import load_model
    from specdec.model.runner import Rows

    def target_token_ids(prompt: list[int], num_tokens: int) -> list[int]:
        model = load_model(str(tiny_model_dir), device="cpu", dtype="float32")
        cache, text, fed = model.runner.new_cache(), list(prompt), 0
        while len(text) < len(prompt) + num_tokens:
            chunk = text[fed : fed + 32]
            logits = model.runner.forward([Rows(cache, chunk)])[0][-1, : model.tokenizer.vocabulary_size]
            fed += len(chunk)
            if fed == len(text):
                text.append(int(logits.argmax()))
        return text

    prompt = [3 + 7 * i % 300 for i in range(120)]
    side, endpoint = verifier
    target = await asyncio.to_thread(target_token_ids, prompt, 200)
    session = side.sessions["session"] = VerifiedSession(target, len(prompt), round_s=0.02)
    arguments = ("--proposer", "draft_model", "--model", str(tiny_model_dir), "--quantization", "none")
    process = await start_drafter(tmp_path, *arguments, "--dtype", "float32", "--threads", "1")
    try:
        listening = await process.wait_for_event("listening", START_TIMEOUT_S)
        async with open_channel(listening["endpoint"]) as channel:
            await DrafterUnderTest(process, DrafterServiceStub(channel)).attach(attach_session(prompt, endpoint))
            await asyncio.wait_for(session.finished.wait(), START_TIMEOUT_S)
    finally:
        await process.stop(DEADLINE_S)
    first = session.drafts[0]
    assert not first.draft_token_ids  # far behind: the verifier is not kept waiting
    guessed = [draft for draft in session.drafts if draft.draft_token_ids]
    assert guessed
    assert all(
        list(draft.draft_token_ids) == target[draft.start_position : draft.start_position + len(draft.draft_token_ids)]
        for draft in guessed
        if draft.start_position + len(draft.draft_token_ids) <= len(target)
    )


async def test_sigterm_leaves_every_session_and_ends_with_0(tmp_path: Path, verifier: tuple[VerifySide, str]) -> None:
    side, endpoint = verifier
    session = side.sessions["session"] = VerifiedSession(TARGET, len(PROMPT), draft_budget=0)
    process = await start_drafter(tmp_path, "--proposer", "ngram")
    async with open_channel((await process.wait_for_event("listening", START_TIMEOUT_S))["endpoint"]) as channel:
        await DrafterUnderTest(process, DrafterServiceStub(channel)).attach(attach_session(PROMPT, endpoint))
        assert await process.stop(DEADLINE_S)
    assert process.exit_code == 0
    await asyncio.wait_for(session.detached.wait(), DEADLINE_S)
    assert not any("[1, 2, 3" in line for line in process.last_lines)
