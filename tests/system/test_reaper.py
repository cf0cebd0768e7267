"""Sessions that nobody owns any more, on a real server."""

import asyncio
import dataclasses
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.reaper import Reaper
from orchestrator.record import RecordState
from orchestrator.session_store import AcquireStatus, SessionStore, StoreSettings, WriteStatus
from specdec.ids import SessionId
from specdec.params import FinishReason
from tests.system.orchestrator_harness import orchestrator
from tests.system.store_fixtures import PROMPT, acquired, make_round, new_nonce, opened
from tests.system.store_servers import free_port, until

pytestmark = pytest.mark.system

S = SessionId("s")
LONGEST_REPLIES_TTL_MS = 60_000


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore() as embedded:
        yield embedded


@pytest_asyncio.fixture
async def store(server: EmbeddedStore) -> AsyncIterator[SessionStore]:
    settings = StoreSettings(server.url, lease_s=0.2, session_ttl_s=30.0, abandoned_ttl_s=10.0)
    async with SessionStore(settings) as session_store:
        yield session_store


async def reaped(store: SessionStore, num_reaped: int = 1) -> list[str]:
    """What the reaper found, once it is that many."""
    found: list[str] = []
    reaper = Reaper(store, on_reaped=found.append)

    async def enough() -> bool:
        await reaper.turn()
        return len(found) >= num_reaped

    await until(enough)
    return found


async def indexed(server: EmbeddedStore) -> set[str]:
    async with Redis.from_url(server.url) as raw:
        keys = await raw.keys("specdec:leases:*")
        return {member.decode() for key in keys for member in await raw.zrange(key, 0, -1)}


async def test_a_claim_that_nobody_opened_is_freed_when_its_lease_is_over(
    server: EmbeddedStore, store: SessionStore
) -> None:
    await acquired(store)
    assert await reaped(store) == ["freed"]
    assert await store.read(S) is None
    assert await indexed(server) == set()
    assert (await store.acquire(S, new_nonce(), must_be_new=True)).status is AcquireStatus.ACQUIRED


async def test_an_abandoned_session_is_marked_lives_shorter_and_may_be_resumed_until_then(
    server: EmbeddedStore, store: SessionStore
) -> None:
    lease = await opened(store)
    assert await reaped(store) == ["abandoned"]
    record = await store.read(S)
    assert record is not None
    assert record.abandoned
    assert (record.state, record.token_ids) == (RecordState.OPEN, PROMPT)
    async with Redis.from_url(server.url) as raw:
        for part in ("record", "tokens", "rounds"):
            assert 0 < await raw.pttl(f"specdec:{{s}}:{part}") <= 10_000
        reply = await store.acquire(S, new_nonce())
        assert reply.status is AcquireStatus.ACQUIRED
        assert await raw.pttl("specdec:{s}:record") > 10_000
    resumed = await store.read(S)
    assert resumed is not None
    assert not resumed.abandoned
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.FENCED


async def test_a_session_whose_owner_gave_it_back_is_abandoned_until_somebody_resumes_it(store: SessionStore) -> None:
    await store.release(await opened(store))
    assert await reaped(store) == ["abandoned"]


async def test_an_owner_that_was_only_slow_has_its_session_back_as_it_was(
    server: EmbeddedStore, store: SessionStore
) -> None:
    lease = await opened(store)
    assert await reaped(store) == ["abandoned"]
    assert await store.renew(lease) is WriteStatus.OK
    record = await store.read(S)
    assert record is not None
    assert not record.abandoned

    async def watched_again() -> bool:
        return await indexed(server) == {"s"}

    await until(watched_again)
    async with Redis.from_url(server.url) as raw:
        assert await raw.pttl("specdec:{s}:record") > 10_000


async def test_an_owner_that_renews_is_left_alone_and_stays_in_the_index(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, lease_s=1.5)) as store:  # no machine is as slow between two calls
        lease = await opened(store)
        reaper = Reaper(store)
        end = time.monotonic() + 2 * store.settings.lease_s
        while time.monotonic() < end:
            assert await store.renew(lease) is WriteStatus.OK
            assert await reaper.turn() == 0
            await asyncio.sleep(0.02)
        assert await indexed(server) == {"s"}


async def test_an_entry_that_comes_too_early_harms_no_running_session(
    server: EmbeddedStore, store: SessionStore
) -> None:
    async with SessionStore(StoreSettings(server.url)) as patient:  # its lease runs for 10 s
        await opened(patient)

        async def watched() -> bool:
            return await indexed(server) == {"s"}

        await until(watched)
        store.lease_index.note(S, 0.0)
        before = await scores(server)

        async def put_off() -> bool:
            assert await Reaper(store).turn() == 0
            (score,) = (await scores(server)).values()
            return score not in before.values() and await is_far(server, score)

        await until(put_off)


async def is_far(server: EmbeddedStore, score: float) -> bool:
    async with Redis.from_url(server.url) as raw:
        seconds, _ = await raw.time()
    return score > (seconds + 6) * 1000  # farther than a look puts off


async def scores(server: EmbeddedStore) -> dict[str, float]:
    async with Redis.from_url(server.url) as raw:
        keys = await raw.keys("specdec:leases:*")
        found = [await raw.zrange(key, 0, -1, withscores=True) for key in keys]
    return {str(member): float(score) for members in found for member, score in members}


async def test_sessions_that_ended_leave_the_index(server: EmbeddedStore, store: SessionStore) -> None:
    await store.release(await opened(store, "finished"), FinishReason.LENGTH)
    await opened(store, "cancelled")
    await store.cancel(SessionId("cancelled"))
    reaper = Reaper(store)

    async def empty() -> bool:
        assert await reaper.turn() == 0
        return await indexed(server) == set()

    async def written() -> bool:
        return await indexed(server) == {"finished", "cancelled"}

    await until(written)
    await until(empty)
    for name, state in (("finished", RecordState.FINISHED), ("cancelled", RecordState.CANCELLED)):
        record = await store.read(SessionId(name))
        assert record is not None
        assert record.state is state


async def test_of_many_reapers_each_session_is_found_by_one(store: SessionStore) -> None:
    for index in range(40):
        await acquired(store, f"s{index}")
    found: list[str] = []
    reapers = [Reaper(store, on_reaped=found.append) for _ in range(4)]

    async def all_found() -> bool:
        await asyncio.gather(*(reaper.turn() for reaper in reapers))
        return len(found) >= 40

    await until(all_found)
    assert len(found) == 40


async def test_a_session_that_was_taken_over_between_look_and_settling_stays_in_the_index(
    server: EmbeddedStore, store: SessionStore
) -> None:
    lease = await acquired(store)
    index = store.lease_index

    async def is_due() -> list[tuple[int, object]]:
        return [(shard, due) for shard in range(16) for due in await index.due(shard, limit=8, put_off_s=60.0)]

    found: list[tuple[int, object]] = []

    async def once_due() -> bool:
        found.extend(await is_due())
        return bool(found)

    await until(once_due)
    before = await scores(server)
    await store.acquire(lease.session_id, new_nonce())

    async def noted_again() -> bool:
        return await scores(server) != before

    await until(noted_again)
    shard, due = found[0]
    await index.settle(shard, [(due, None)])  # type: ignore[list-item]
    assert await indexed(server) == {"s"}


async def test_no_key_lives_for_ever(server: EmbeddedStore) -> None:
    settings = StoreSettings(server.url, lease_s=0.3, session_ttl_s=0.6, abandoned_ttl_s=0.3)
    async with SessionStore(settings) as store, Redis.from_url(server.url) as raw:
        await acquired(store, "claimed")
        running = await opened(store, "running")
        await store.commit(running, make_round(1, PROMPT, [8]))
        await store.bump(running)
        await store.release(await opened(store, "finished"), FinishReason.LENGTH)
        await opened(store, "cancelled")
        await store.cancel(SessionId("cancelled"))
        await store.renew(dataclasses.replace(running, session_id=SessionId("never-there")))
        await store.set_drained("127.0.0.1:1", drained=True)
        for key in await raw.keys("*"):
            assert await raw.pttl(key) > 0, key  # -1 would be: for ever
        await store.set_drained("127.0.0.1:1", drained=False)

        async def only_remembered_answers() -> bool:
            return all(key.endswith(b":replies") for key in await raw.keys("*"))

        await until(only_remembered_answers)
        for key in await raw.keys("*"):
            assert 0 < await raw.pttl(key) <= LONGEST_REPLIES_TTL_MS
            await raw.pexpire(key, 1)

        async def empty() -> bool:
            return int(await raw.dbsize()) == 0

        await until(empty)


async def test_endpoints_are_drained_for_everybody_until_they_are_not(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url)) as one, SessionStore(StoreSettings(server.url)) as other:
        assert await other.read_drained() == frozenset()
        await one.set_drained("127.0.0.1:1", drained=True)
        await one.set_drained("127.0.0.1:2", drained=True)
        await other.set_drained("127.0.0.1:1", drained=False)
        assert await one.read_drained() == await other.read_drained() == {"127.0.0.1:2"}


async def test_an_orchestrator_reaps_beside_its_streams_and_counts_what_it_found(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, lease_s=0.1)) as other:
        await acquired(other, "claimed")
        await opened(other, "left")

        async def noted() -> bool:
            return await indexed(server) == {"claimed", "left"}

        await until(noted)
    port = free_port()
    async with orchestrator([], redis=server.url, metrics=f"127.0.0.1:{port}"):

        async def counted() -> bool:
            text = await asyncio.to_thread(scraped, port)
            return all(f'sessions_reaped_total{{outcome="{what}"}} 1.0' in text for what in ("freed", "abandoned"))

        await until(counted)


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as response:
        return str(response.read().decode())
