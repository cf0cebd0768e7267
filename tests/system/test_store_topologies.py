"""The session store on several servers: a cluster whose slots move and whose nodes die, a primary that fails over."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from redis.cluster import key_slot

from orchestrator.reaper import Reaper
from orchestrator.record import record_keys
from orchestrator.session_store import AcquireStatus, Lease, SessionStore, StoreSettings, WriteStatus
from specdec.errors import StoreUnavailableError
from specdec.ids import Epoch, SessionId
from tests.system.store_fixtures import PROMPT, acquired, make_checkpoint, make_round, new_nonce, opened
from tests.system.store_servers import FAILOVER_TIMEOUT_S, StoreCluster, StoreServer, WatchedPrimary, running, until

pytestmark = pytest.mark.system

NUM_SESSIONS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StoreCluster]:
    async with running(StoreCluster(tmp_path_factory.mktemp("cluster"))) as servers:
        yield servers


def slot_of(session_id: str) -> int:
    return int(key_slot(record_keys(SessionId(session_id))[0].encode()))


async def written(write: Callable[[], Awaitable[WriteStatus]]) -> WriteStatus:
    """The answer, once the store gives one again."""
    async with asyncio.timeout(FAILOVER_TIMEOUT_S):
        while True:
            try:
                return await write()
            except StoreUnavailableError:
                await asyncio.sleep(0.1)


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_live_on_all_nodes_of_a_cluster_and_their_commits_go_to_each_node_apart(
    cluster: StoreCluster,
) -> None:
    async with SessionStore(StoreSettings(cluster.url)) as store:
        leases = [await opened(store, f"a{index}") for index in range(NUM_SESSIONS)]
        assert len({slot_of(lease.session_id) * 3 // 16_384 for lease in leases}) == 3
        statuses = await asyncio.gather(*(store.commit(lease, make_round(1, PROMPT, [8])) for lease in leases))
        assert set(statuses) == {WriteStatus.OK}
        assert await store.commit(leases[0], make_round(1, PROMPT, [8])) is WriteStatus.DUPLICATE
        assert (await store.bump(leases[1])).epoch == 2
        assert await store.cancel(leases[2].session_id)
        for lease in leases[3:]:
            record = await store.read(lease.session_id)
            assert record is not None
            assert record.token_ids == (*PROMPT, 8)
        await store.set_drained("127.0.0.1:1", drained=True)
        assert await store.read_drained() == {"127.0.0.1:1"}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_whose_slot_moved_to_another_node_goes_on_there(cluster: StoreCluster) -> None:
    async with SessionStore(StoreSettings(cluster.url)) as store:
        lease = await opened(store, "moving")
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
        await cluster.move_slot(slot_of("moving"))
        assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.OK
        assert await store.renew(lease) is WriteStatus.OK
        record = await store.read(lease.session_id)
        assert record is not None
        assert record.token_ids == (*PROMPT, 8, 9)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_that_dies_takes_its_own_sessions_along_and_no_others(cluster: StoreCluster) -> None:
    async with SessionStore(StoreSettings(cluster.url, call_timeout_s=0.5)) as store:
        leases = [await opened(store, f"b{index}") for index in range(NUM_SESSIONS)]
        cluster.nodes[1].kill()
        outcomes = await asyncio.gather(
            *(store.commit(lease, make_round(1, PROMPT, [8])) for lease in leases), return_exceptions=True
        )
        lost = [isinstance(outcome, StoreUnavailableError) for outcome in outcomes]
        on_dead_node = [slot_of(lease.session_id) * 3 // 16_384 == 1 for lease in leases]
        assert lost == on_dead_node
        await cluster.nodes[1].start()
        await until(cluster.is_whole)
        for index, lease in enumerate(leases):  # the node came back empty
            status = await written(lambda lease=lease: store.renew(lease))  # type: ignore[misc]
            assert status is (WriteStatus.LOST if on_dead_node[index] else WriteStatus.OK)


@pytest.mark.asyncio(loop_scope="module")
async def test_abandoned_sessions_of_a_cluster_are_found_and_nothing_lives_for_ever(cluster: StoreCluster) -> None:
    for node in cluster.nodes:
        async with node.client() as client:
            await client.flushall()
    settings = StoreSettings(cluster.url, lease_s=0.2, session_ttl_s=30.0, abandoned_ttl_s=0.5)
    async with SessionStore(settings) as store:
        for index in range(8):
            await opened(store, f"open{index}")
            await acquired(store, f"claimed{index}")
        reaped: list[str] = []
        reaper = Reaper(store, on_reaped=reaped.append)

        async def all_found() -> bool:
            await reaper.turn()
            return len(reaped) == 16

        await until(all_found)
        assert sorted(reaped) == ["abandoned"] * 8 + ["freed"] * 8


async def test_a_replica_that_was_promoted_serves_the_sessions_of_the_primary_that_died(tmp_path: Path) -> None:
    async with running(WatchedPrimary(tmp_path)) as servers, SessionStore(StoreSettings(servers.url)) as store:
        lease = await opened(store)
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
        async with servers.primary.client() as client:
            await client.execute_command("WAIT", 1, 5000)
        servers.primary.kill()
        await until(servers.replica_is_primary, FAILOVER_TIMEOUT_S)
        two = make_round(2, [*PROMPT, 8], [9])
        assert await written(lambda: store.commit(lease, two, request_id="c")) is WriteStatus.OK
        assert await store.commit(lease, two, request_id="c") is WriteStatus.OK
        record = await store.read(lease.session_id)
        assert record is not None
        assert (record.round, record.token_ids) == (2, (*PROMPT, 8, 9))


async def test_behind_one_address_a_primary_that_became_a_replica_is_left_and_asked_again(tmp_path: Path) -> None:
    async with running(StoreServer(tmp_path / "one")) as server, SessionStore(StoreSettings(server.url)) as store:
        lease = await opened(store)
        async with server.client() as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(StoreUnavailableError, match="ReadOnly"):
            await store.commit(lease, make_round(1, PROMPT, [8]))
        async with server.client() as client:
            await client.execute_command("REPLICAOF", "NO", "ONE")
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK


async def test_a_store_that_is_back_within_the_deadline_is_met_by_a_retry(tmp_path: Path) -> None:
    async with running(StoreServer(tmp_path / "one")) as server, SessionStore(StoreSettings(server.url)) as store:
        await asyncio.gather(*(acquired(store, f"s{index}") for index in range(8)))  # some connections
        server.kill()
        await server.start()
        reply = await store.acquire(SessionId("s0"), new_nonce())
        assert (reply.status, reply.epoch) == (AcquireStatus.ACQUIRED, 1)
        gone = Lease(SessionId("s1"), Epoch(1), new_nonce())
        assert await store.restore(make_checkpoint(gone)) is WriteStatus.OK
