"""A session that changes its owner at a real verifier, over the wire: a broken stream, a take-over, a drain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from specdec.config import WireSettings
from specdec.errors import DrainingError, MalformedRequestError, SpecdecError, TooManyStreamsError
from specdec.v1 import common_pb2
from specdec.v1 import verifier_pb2 as pb
from specdec.v1.verifier_pb2_grpc import VerifierServiceStub
from specdec.wire.channel import open_channel
from specdec.wire.interceptors import error_from_rpc
from tests.system.hand_drafter import DEADLINE_S, HandDrafter
from tests.system.lost_links import proxy_before
from tests.system.toy_verifier import ToyVerifier, toy_verifier
from tests.unit.verifier_service.harness import greedy_token_ids

PROMPT = (5, 6, 7)
NUM_TOKENS = 60
OUTPUT = greedy_token_ids(PROMPT, NUM_TOKENS)
FORWARD_TIME_S = 0.002


class Owner:
    """One owner's stream for the session."""

    def __init__(self, stub: VerifierServiceStub, epoch: int, **fields: object) -> None:
        spec = common_pb2.GenerationSpec(
            tokens=common_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stop=common_pb2.StopCriteria(max_new_tokens=NUM_TOKENS),
        )
        request = {"session_id": "s", "epoch": epoch, "owner_nonce": bytes([epoch % 256]) * 16, "spec": spec, **fields}
        self.call = stub.OpenSession(pb.OpenSessionRequest(**request), timeout=DEADLINE_S)
        self.opened = pb.Opened()
        self.token_ids: list[int] = []

    async def until(self, kind: str, *, num_tokens: int = 0) -> pb.SessionEvent:
        """The next event of a kind, once so many tokens have come. Raises the error that ended the stream."""
        try:
            while True:
                response = await self.call.read()
                assert response is not grpc.aio.EOF, f"ended before {kind}"
                event = response.event
                if event.HasField("opened"):
                    self.opened = event.opened
                self.token_ids += event.commit.token_ids
                if event.WhichOneof("event") == kind and len(self.token_ids) >= num_tokens:
                    return event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


@pytest_asyncio.fixture
async def verifier() -> AsyncIterator[ToyVerifier]:
    async with toy_verifier(forward_time_s=FORWARD_TIME_S, max_verify_streams_per_peer=2) as verifier:
        yield verifier


async def until_closed(verifier: ToyVerifier) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if verifier.engine.load().num_active_sessions == 0:
                return
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("num_received", [1, 4, 10])
async def test_an_owner_that_knows_the_output_alone_has_its_prompt_read_and_goes_on(
    verifier: ToyVerifier, num_received: int
) -> None:
    old = Owner(verifier.stub, 1)
    await old.until("commit", num_tokens=10)
    old.call.cancel()
    await until_closed(verifier)
    spec = common_pb2.GenerationSpec(
        text="efg",  # PROMPT
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stop=common_pb2.StopCriteria(max_new_tokens=NUM_TOKENS),
    )
    new = Owner(verifier.stub, 2, spec=spec, committed_token_ids=OUTPUT[:num_received])
    finished = (await new.until("finished")).finished
    kept = list(new.opened.kept_token_ids)
    assert tuple(new.opened.prompt_token_ids) == PROMPT
    assert len(kept) >= 10 - num_received
    assert [*OUTPUT[:num_received], *kept, *new.token_ids] == OUTPUT
    assert (finished.usage.num_prompt_tokens, finished.usage.num_output_tokens) == (len(PROMPT), NUM_TOKENS)


async def test_the_next_owner_finds_what_was_decided_after_the_last_token_that_it_knows(verifier: ToyVerifier) -> None:
    old = Owner(verifier.stub, 1)
    await old.until("commit", num_tokens=10)
    old.call.cancel()
    await until_closed(verifier)
    new = Owner(verifier.stub, 2, committed_token_ids=[*PROMPT, *OUTPUT[:4]], prompt_length=len(PROMPT))
    finished = (await new.until("finished")).finished
    kept = list(new.opened.kept_token_ids)
    assert len(kept) >= 6
    assert new.opened.kept_epoch == 1
    assert [*OUTPUT[:4], *kept, *new.token_ids] == OUTPUT
    assert finished.usage.num_output_tokens == len(OUTPUT)


async def test_an_owner_whose_stream_hangs_is_fenced_by_the_next_and_its_tokens_are_gone_on_from(
    verifier: ToyVerifier,
) -> None:
    old = Owner(verifier.stub, 1)
    await old.until("commit", num_tokens=5)
    new = Owner(verifier.stub, 3)
    await new.until("finished")
    assert (await old.until("fenced")).fenced.highest_epoch == 3
    assert list(new.opened.kept_token_ids) == old.token_ids
    assert [*old.token_ids, *new.token_ids] == OUTPUT


async def test_opens_that_come_twice_and_owners_of_yesterday_run_nothing(verifier: ToyVerifier) -> None:
    owner = Owner(verifier.stub, 2)
    await owner.until("commit")
    with pytest.raises(SpecdecError, match="open already"):
        await Owner(verifier.stub, 2).until("opened")
    for epoch, nonce in ((1, b"1" * 16), (2, b"2" * 16)):
        late = await Owner(verifier.stub, epoch, owner_nonce=nonce).until("fenced")
        assert late.fenced.highest_epoch == 2
    owner.call.cancel()
    await until_closed(verifier)
    assert (await Owner(verifier.stub, 2).until("fenced")).fenced.highest_epoch == 2


@pytest.mark.parametrize(
    "absurd",
    [
        {"committed_token_ids": [1] * 2_000_000, "prompt_length": 3},
        {"committed_token_ids": [1] * 2_000, "prompt_length": 3},
        {"committed_token_ids": [1, 2], "prompt_length": 3},
        {"committed_token_ids": [1, 2], "prompt_length": -1},
        {"committed_token_ids": [-1, 2], "prompt_length": 1},
        {"committed_token_ids": [1, 2**31 - 1], "prompt_length": 1},
        {"recorded_token_ids": [1] * 2_000_000, "recorded_epoch": 1},
        {"recorded_token_ids": [1] * 2_000, "recorded_epoch": 1},
        {"recorded_token_ids": [-1], "recorded_epoch": 1},
        {"recorded_token_ids": [1], "recorded_epoch": 3},
        {"recorded_token_ids": [1], "recorded_epoch": -1},
        {"epoch": -1},
        {"sample_index": 2**31 - 1},
        {"owner_nonce": b"x" * 1_000_000},
    ],
)
async def test_an_absurd_request_of_an_owner_is_refused_and_hurts_nobody(verifier: ToyVerifier, absurd) -> None:
    honest = Owner(verifier.stub, 1, session_id="honest")
    await honest.until("opened")
    with pytest.raises(SpecdecError) as refused:
        await Owner(verifier.stub, **{"epoch": 2, **absurd}).until("opened")
    assert refused.value.status == "INVALID_ARGUMENT"
    assert isinstance(refused.value, MalformedRequestError) or refused.value.reason == "TOKEN_OUT_OF_VOCABULARY"
    await honest.until("finished")
    assert honest.token_ids == OUTPUT


async def test_a_draining_verifier_tells_its_owners_serves_on_and_takes_nobody_new(verifier: ToyVerifier) -> None:
    owner = Owner(verifier.stub, 1)
    await owner.until("opened")
    await verifier.on_device(lambda: verifier.engine.drain(5.0))
    assert (await owner.until("draining")).draining.grace.seconds == 5
    with pytest.raises(DrainingError):
        await Owner(verifier.stub, 1, session_id="new").until("opened")
    await owner.until("finished")
    assert owner.token_ids == OUTPUT


async def test_a_session_that_is_handed_over_in_a_drain_goes_on_elsewhere_without_a_token_lost_or_changed(
    verifier: ToyVerifier,
) -> None:
    async with toy_verifier() as other:
        old = Owner(verifier.stub, 1)
        await old.until("commit", num_tokens=5)
        await verifier.on_device(lambda: verifier.engine.drain(5.0))
        await old.until("draining")
        known = list(old.token_ids)
        new = Owner(other.stub, 2, committed_token_ids=[*PROMPT, *known], prompt_length=len(PROMPT))
        await new.until("opened")
        old.call.cancel()
        await until_closed(verifier)
        await new.until("finished")
        assert [*known, *new.token_ids] == OUTPUT


async def test_a_verifier_that_goes_tells_whom_it_still_serves(verifier: ToyVerifier) -> None:
    owner = Owner(verifier.stub, 1)
    await owner.until("commit")
    await verifier.on_device(verifier.engine.end_sessions)
    with pytest.raises(DrainingError):
        await owner.until("finished")


async def test_one_address_has_so_many_drafters_streams_and_a_place_is_free_again_when_one_ends(
    verifier: ToyVerifier,
) -> None:
    owner = Owner(verifier.stub, 1)
    await owner.until("opened")
    first, second = HandDrafter(verifier.stub), HandDrafter(verifier.stub)
    session = _Named("s")
    for drafter in (first, second):
        drafter.attach(session)
        await drafter.answer("attach_refused")
    async with open_channel(verifier.endpoint) as another_connection:
        with pytest.raises(TooManyStreamsError):
            await _answer_on_a_new_stream(VerifierServiceStub(another_connection))
        first.vanish()
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with contextlib.suppress(TooManyStreamsError):
                    await _answer_on_a_new_stream(VerifierServiceStub(another_connection))
                    return


async def _answer_on_a_new_stream(stub: VerifierServiceStub) -> None:
    call = stub.Verify(timeout=DEADLINE_S)
    try:
        await call.write(pb.VerifyRequest(session_id="nobody", attachment_id=1, draft=pb.Draft(draft_sequence=1)))
        assert (await call.read()).HasField("refused")
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    except asyncio.InvalidStateError:  # it was refused before the message was written
        raise TooManyStreamsError("no stream") from None
    finally:
        call.cancel()


class _Named:
    """A session by its name, without its secret."""

    epoch, opened = 1, None

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id


async def test_an_owner_behind_a_dead_link_is_noticed_by_keepalive_and_its_tokens_are_kept() -> None:
    wire = WireSettings(keepalive_time_s=0.2, keepalive_timeout_s=0.2, min_ping_interval_s=0.1)
    async with (
        toy_verifier(forward_time_s=0.02, wire=wire) as verifier,
        proxy_before(verifier.endpoint) as proxy,
        open_channel(proxy.endpoint) as channel,
    ):
        old = Owner(VerifierServiceStub(channel), 1)
        await old.until("commit", num_tokens=2)
        proxy.vanish()
        await until_closed(verifier)
        assert await verifier.on_device(lambda: verifier.engine.handover.num_kept) == 1
