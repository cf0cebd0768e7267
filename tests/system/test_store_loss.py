"""A store that was killed and came back without its last writes, with nothing, or with two owners of one epoch. Redis
alone cannot tell an owner that it forgot; the verifier is the second fence."""

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from orchestrator.record import RecordState
from orchestrator.session_store import AcquireStatus, Lease, SessionStore, StoreSettings, WriteStatus
from specdec import errors
from specdec.bench.faults.proxy import FaultProxy
from specdec.ids import Epoch, SessionId
from specdec.messages import Delta
from specdec.v1 import generation_pb2
from tests.system.fakes import expected_output, served_verifier
from tests.system.fencing_verifier import FencingVerifier
from tests.system.fleet import PROMPT_IDS
from tests.system.lost_links import proxy_before
from tests.system.orchestrator_harness import (
    Client,
    drained,
    error_of,
    eventually,
    frames,
    long_spec,
    orchestrator,
    read_until_tokens,
    record_in,
    routed,
)
from tests.system.store_fixtures import PROMPT as TOKENS
from tests.system.store_fixtures import make_checkpoint, make_round, new_nonce, opened
from tests.system.store_servers import HOST, StoreServer, running

pytestmark = pytest.mark.system

S = SessionId("s")
SLOW_S = 0.03
NUM_TOKENS = 240
LEASE_S = 1.0
DURABLE = ("appendonly yes", "appendfsync always", "auto-aof-rewrite-percentage 0")
WHOLE = expected_output(PROMPT_IDS, NUM_TOKENS)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[StoreServer]:
    """Writes each change to its disk before it answers."""
    async with running(StoreServer(tmp_path / "server", *DURABLE)) as one:
        yield one


@pytest_asyncio.fixture
async def store(server: StoreServer) -> AsyncIterator[SessionStore]:
    async with SessionStore(StoreSettings(server.url)) as session_store:
        yield session_store


def copied(server: StoreServer, to: Path) -> Path:
    """What is on its disk now."""
    shutil.copytree(server.folder, to)
    return to


async def test_an_old_owner_whose_epoch_came_back_is_out_as_soon_as_the_rightful_one_writes(
    server: StoreServer, store: SessionStore, tmp_path: Path
) -> None:
    old = await opened(store)
    assert await store.commit(old, make_round(1, TOKENS, [8])) is WriteStatus.OK
    before = copied(server, tmp_path / "before")
    await store.release(old)
    nonce = new_nonce()
    new = Lease(S, (await store.acquire(S, nonce)).epoch, nonce)
    assert await store.restore(make_checkpoint(new, [*TOKENS, 8])) is WriteStatus.OK
    assert await store.commit(new, make_round(1, [*TOKENS, 8], [9])) is WriteStatus.OK
    await server.restart_with(before)
    record = await store.read(S)
    assert record is not None
    assert (record.epoch, record.token_ids) == (1, (*TOKENS, 8))  # it forgot
    assert await store.commit(old, make_round(2, [*TOKENS, 8], [66])) is WriteStatus.OK  # Redis cannot know better
    assert await store.commit(new, make_round(2, [*TOKENS, 8, 9], [10])) is WriteStatus.LOST
    assert await store.restore(make_checkpoint(new, [*TOKENS, 8, 9, 10], round_number=2)) is WriteStatus.OK
    assert await store.commit(old, make_round(3, [*TOKENS, 8, 66], [67])) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(old, [*TOKENS, 8, 66], round_number=2)) is WriteStatus.FENCED
    record = await store.read(S)
    assert record is not None
    assert record.token_ids == (*TOKENS, 8, 9, 10)


async def test_an_old_owner_that_finds_nothing_may_write_and_is_out_as_soon_as_the_rightful_one_does(
    server: StoreServer, store: SessionStore, tmp_path: Path
) -> None:
    empty = copied(server, tmp_path / "empty")
    old = await opened(store)
    new = Lease(S, Epoch(2), new_nonce())
    assert await store.restore(make_checkpoint(new)) is WriteStatus.OK
    await server.restart_with(empty)
    assert await store.commit(old, make_round(1, TOKENS, [66])) is WriteStatus.LOST
    assert await store.restore(make_checkpoint(old, [*TOKENS, 66], round_number=1)) is WriteStatus.OK
    assert await store.commit(new, make_round(1, TOKENS, [8])) is WriteStatus.LOST
    assert await store.restore(make_checkpoint(new, [*TOKENS, 8], round_number=1)) is WriteStatus.OK
    assert await store.commit(old, make_round(2, [*TOKENS, 66], [67])) is WriteStatus.FENCED
    record = await store.read(S)
    assert record is not None
    assert record.token_ids == (*TOKENS, 8)


async def test_of_two_owners_of_one_epoch_the_store_takes_the_one_that_it_knows(
    server: StoreServer, store: SessionStore, tmp_path: Path
) -> None:
    empty = copied(server, tmp_path / "empty")
    first = await opened(store)
    await server.restart_with(empty)
    second = await opened(store)
    assert first.epoch == second.epoch == 1
    assert await store.commit(first, make_round(1, TOKENS, [8])) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(first)) is WriteStatus.FENCED
    assert await store.commit(second, make_round(1, TOKENS, [9])) is WriteStatus.OK
    # The second was fenced by the verifier, which knew the first, and acquires above it.
    reply = await store.acquire(S, second.owner_nonce, epoch_floor=1)
    assert (reply.status, reply.epoch) == (AcquireStatus.ACQUIRED, 2)
    assert await store.commit(second, make_round(2, TOKENS, [9])) is WriteStatus.FENCED


@dataclasses.dataclass
class TwoReplicas:
    """`first` reaches the store by a way that can be cut."""

    first: Client
    second: Client
    link: FaultProxy
    verifier: FencingVerifier


@pytest_asyncio.fixture
async def replicas(server: StoreServer) -> AsyncIterator[TwoReplicas]:
    verifier = FencingVerifier(round_s=SLOW_S)
    async with (
        served_verifier(verifier) as target,
        proxy_before(f"{HOST}:{server.port}") as link,
        orchestrator([target], redis=f"redis://{link.endpoint}/0", lease_s=LEASE_S) as first,
        orchestrator([target], redis=server.url, lease_s=LEASE_S) as second,
    ):
        await routed(first)
        await routed(second)
        yield TwoReplicas(first, second, link, verifier)


def part(link: FaultProxy) -> None:
    """What is connected breaks, and nobody connects until `server` is set again."""
    link.server = ""
    link.reset(None)


Loss = Callable[[StoreServer, Path, Path], Awaitable[None]]


async def last_second(server: StoreServer, before: Path, empty: Path) -> None:
    await server.restart_with(before)


async def everything(server: StoreServer, before: Path, empty: Path) -> None:
    await server.restart_with(empty)


@pytest.mark.parametrize("lose", [last_second, everything])
async def test_a_store_that_forgot_a_takeover_repeats_no_token_changes_none_and_lets_no_old_owner_in(
    server: StoreServer, store: SessionStore, replicas: TwoReplicas, tmp_path: Path, lose: Loss
) -> None:
    empty = copied(server, tmp_path / "empty")
    stale = replicas.first.call(long_spec(NUM_TOKENS), "s")
    received = (await read_until_tokens(stale, 6)).token_ids
    before = copied(server, tmp_path / "before")  # the first replica's record, its lease running
    part(replicas.link)  # it streams on, and its lease runs out
    whole = list(received)
    resumed = replicas.second.generation.Resume(resume_request("s", received), timeout=15.0)
    lost = False
    async for frame in frames(resumed):
        if isinstance(frame, Delta):
            assert frame.position == len(PROMPT_IDS) + len(whole)
            whole += frame.token_ids
            if not lost:
                lost = True
                await lose(server, before, empty)
                replicas.link.server = f"{HOST}:{server.port}"
    assert whole == WHOLE
    assert isinstance(await error_of(drained(stale)), errors.FencedError)
    record = await record_in(store, "s", RecordState.FINISHED)
    assert (record.epoch, record.token_ids) == (2, (*PROMPT_IDS, *WHOLE))


def resume_request(session_id: str, received: list[int]) -> generation_pb2.ResumeRequest:
    return generation_pb2.ResumeRequest(session_id=session_id, received_token_ids=received)


async def test_of_two_replicas_that_were_given_the_same_epoch_one_serves_the_session(
    server: StoreServer, store: SessionStore, replicas: TwoReplicas, tmp_path: Path
) -> None:
    empty = copied(server, tmp_path / "empty")
    first = replicas.first.call(long_spec(NUM_TOKENS), "s")
    await read_until_tokens(first, 4)
    part(replicas.link)
    await server.restart_with(empty)
    answer = await replicas.second.generate(long_spec(NUM_TOKENS), "s")  # its first epoch is 1 again
    replicas.link.server = f"{HOST}:{server.port}"
    assert isinstance(await error_of(drained(first)), errors.FencedError)
    assert answer.token_ids == WHOLE
    assert [session.request.epoch for session in replicas.verifier.sessions] == [1, 2]
    record = await record_in(store, "s", RecordState.FINISHED)
    assert (record.epoch, record.token_ids) == (2, (*PROMPT_IDS, *WHOLE))


async def test_strict_never_streams_a_token_that_the_record_lacks_however_the_store_dies(
    server: StoreServer, store: SessionStore
) -> None:
    verifier = FencingVerifier(round_s=0.005)
    async with (
        served_verifier(verifier) as target,
        orchestrator([target], redis=server.url, durability="strict") as client,
    ):
        await routed(client)
        received: list[int] = []
        streams = asyncio.Event()

        async def read() -> None:
            async for frame in frames(client.call(long_spec(), "s")):
                if isinstance(frame, Delta):
                    received.extend(frame.token_ids)
                if len(received) >= 20:
                    streams.set()

        reading = asyncio.create_task(error_of(read()))
        await asyncio.wait_for(streams.wait(), 10.0)
        server.kill()  # in the middle of a commit, or between two: never mind
        assert isinstance(await asyncio.wait_for(reading, 20.0), errors.StoreUnavailableError)
        await server.start()
        record = await store.read(S)
        assert record is not None
        assert record.token_ids is not None
        recorded = record.token_ids[record.prompt_length :]
        assert recorded[: len(received)] == tuple(received)


async def test_relaxed_streams_on_without_the_store_and_writes_everything_anew_when_it_is_back(
    server: StoreServer, store: SessionStore, tmp_path: Path
) -> None:
    empty = copied(server, tmp_path / "empty")
    verifier = FencingVerifier(round_s=SLOW_S)
    async with served_verifier(verifier) as target, orchestrator([target], redis=server.url) as client:
        await routed(client)
        call = client.call(long_spec(), "s")
        answer = await read_until_tokens(call, 4)
        server.kill()
        num_before = len(answer.token_ids)
        await read_until_tokens(call, num_before + 20, answer)
        shutil.rmtree(server.folder)
        shutil.copytree(empty, server.folder)
        await server.start()

        async def caught_up() -> bool:
            await read_until_tokens(call, len(answer.token_ids) + 2, answer)
            record = await store.read(S)
            return record is not None and record.committed_length >= len(PROMPT_IDS) + num_before + 20

        await eventually(caught_up, timeout_s=15.0)
        assert answer.token_ids == expected_output(PROMPT_IDS, len(answer.token_ids))
        call.cancel()
