"""The session record and its scripts against a real server."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.record import RecordState
from orchestrator.session_store import (
    AcquireStatus,
    BumpReply,
    Lease,
    ReapStatus,
    SessionStore,
    StoreSettings,
    WriteStatus,
)
from specdec.config import OrchestratorSettings
from specdec.errors import StoreUnavailableError
from specdec.ids import Epoch, SessionId, digest_tokens
from specdec.params import FinishReason
from tests.system.store_fixtures import PROMPT, acquired, make_checkpoint, make_round, new_nonce, opened

pytestmark = pytest.mark.system

SHORT_LEASE_S = 0.15
NUM_IN_BURST = OrchestratorSettings.model_fields["max_sessions"].default
S = SessionId("s")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore() as embedded:
        yield embedded


@pytest_asyncio.fixture
async def store(server: EmbeddedStore) -> AsyncIterator[SessionStore]:
    async with SessionStore(StoreSettings(server.url)) as session_store:
        yield session_store


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the server's clock sets no event of ours
            await asyncio.sleep(0.02)


async def test_a_record_reads_back_as_it_was_written(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.commit(lease, make_round(1, PROMPT, [8, 2**31 - 1])) is WriteStatus.OK
    record = await store.read(S)
    assert record is not None
    assert record.request is not None
    assert record.state is RecordState.OPEN
    assert (record.epoch, record.owner_nonce, record.round) == (1, lease.owner_nonce, 1)
    assert record.token_ids == (*PROMPT, 8, 2**31 - 1)
    assert (record.prompt_length, record.committed_length) == (3, 5)
    assert (record.verifier_cached_length, record.drafter_cached_length) == (3, 2)
    assert (record.verifier, record.drafter) == ("127.0.0.1:1", "127.0.0.1:2")
    assert record.prefix_digest == digest_tokens([*PROMPT, 8, 2**31 - 1])
    assert record.request == dataclasses.replace(make_checkpoint(lease).request, prompt="")
    assert (record.model, record.numerics_fingerprint) == ("target", "bits")


async def test_a_session_that_nobody_opened_has_no_record(store: SessionStore) -> None:
    assert await store.read(SessionId("none")) is None


async def test_a_fresh_session_gets_epoch_one_and_a_floor_lifts_it(store: SessionStore) -> None:
    assert (await store.acquire(S, new_nonce())).epoch == 1
    assert (await store.acquire(SessionId("other"), new_nonce(), epoch_floor=41)).epoch == 42


async def test_a_claim_that_is_under_way_keeps_its_name(store: SessionStore) -> None:
    await acquired(store)
    assert (await store.acquire(S, new_nonce(), must_be_new=True)).status is AcquireStatus.EXISTS


async def test_a_claim_that_comes_after_its_owners_record_changes_no_epoch(store: SessionStore) -> None:
    lease = Lease(S, Epoch(1), new_nonce())
    assert await store.restore(make_checkpoint(lease)) is WriteStatus.OK  # the claim was given up, and is on its way
    assert (await store.acquire(S, lease.owner_nonce)).epoch == 1
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
    assert (await store.acquire(S, lease.owner_nonce, epoch_floor=1)).epoch == 2


async def test_the_same_nonce_may_acquire_again_with_a_higher_epoch(store: SessionStore) -> None:
    nonce = new_nonce()
    first = await store.acquire(S, nonce)
    again = await store.acquire(S, nonce, epoch_floor=7)
    assert (first.status, again.status) == (AcquireStatus.ACQUIRED, AcquireStatus.ACQUIRED)
    assert (first.epoch, again.epoch) == (1, 8)


async def test_a_session_is_taken_over_at_once_and_its_old_owner_is_fenced(store: SessionStore) -> None:
    old = await opened(store)
    assert (await store.acquire(S, new_nonce())).status is AcquireStatus.ACQUIRED
    assert await store.commit(old, make_round(1, PROMPT, [8])) is WriteStatus.FENCED
    assert await store.renew(old) is WriteStatus.FENCED
    assert (await store.bump(old)).status is WriteStatus.FENCED
    assert await store.release(old) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(old)) is WriteStatus.FENCED
    record = await store.read(S)
    assert record is not None
    assert (record.epoch, record.round, record.token_ids) == (2, 0, PROMPT)


async def test_the_name_of_a_claim_that_nobody_opened_is_free_once_its_lease_has_run_out(
    server: EmbeddedStore,
) -> None:
    async with SessionStore(StoreSettings(server.url, lease_s=1.5)) as store:  # it runs while three calls are made
        lease = await acquired(store)

        async def claimed() -> bool:
            return (await store.acquire(S, new_nonce(), must_be_new=True)).status is AcquireStatus.ACQUIRED

        assert not await claimed()
        assert await store.renew(lease) is WriteStatus.OK
        await eventually(claimed)


async def test_a_released_session_is_free_at_once_and_keeps_its_record(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.release(lease, FinishReason.LENGTH) is WriteStatus.OK
    record = await store.read(S)
    assert record is not None
    assert (record.state, record.finish_reason) == (RecordState.FINISHED, FinishReason.LENGTH)
    reply = await store.acquire(S, new_nonce())
    assert (reply.status, reply.epoch) == (AcquireStatus.ACQUIRED, 2)


async def test_a_session_that_must_be_new_is_refused_where_a_record_is(store: SessionStore) -> None:
    claimed = await acquired(store, "claimed")
    await store.release(claimed)
    finished = await opened(store, "finished")
    await store.release(finished, FinishReason.LENGTH)
    for session_id, status in (("claimed", AcquireStatus.ACQUIRED), ("finished", AcquireStatus.EXISTS)):
        assert (await store.acquire(SessionId(session_id), new_nonce(), must_be_new=True)).status is status


async def test_exactly_one_of_many_wins_a_session(store: SessionStore) -> None:
    replies = await asyncio.gather(*(store.acquire(S, new_nonce(), must_be_new=True) for _ in range(64)))
    assert sorted(reply.status.value for reply in replies) == ["ACQUIRED"] + ["EXISTS"] * 63
    assert {reply.epoch for reply in replies} == {1}


async def test_of_many_that_take_a_session_over_the_last_one_owns_it(store: SessionStore) -> None:
    await opened(store)
    nonces = [new_nonce() for _ in range(64)]
    replies = await asyncio.gather(*(store.acquire(S, nonce) for nonce in nonces))
    assert sorted(reply.epoch for reply in replies) == list(range(2, 66))
    leases = [Lease(S, reply.epoch, nonce) for reply, nonce in zip(replies, nonces, strict=True)]
    for lease in leases:
        expected = WriteStatus.OK if lease.epoch == 65 else WriteStatus.FENCED
        assert await store.renew(lease) is expected


async def test_a_burst_of_calls_waits_for_connections_and_none_is_told_that_the_store_is_away(
    store: SessionStore,
) -> None:
    names = [SessionId(f"s{index}") for index in range(NUM_IN_BURST)]
    replies = await asyncio.gather(*(store.acquire(name, new_nonce()) for name in names))
    assert {reply.status for reply in replies} == {AcquireStatus.ACQUIRED}


async def test_calls_that_are_given_up_in_a_burst_leave_the_connections_to_others(store: SessionStore) -> None:
    for turn in range(3):
        names = [SessionId(f"s{turn}.{index}") for index in range(NUM_IN_BURST)]
        calls = [asyncio.create_task(store.acquire(name, new_nonce())) for name in names]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for call in calls[::2]:
            call.cancel()
        replies = await asyncio.gather(*calls[1::2])
        assert {reply.status for reply in replies} == {AcquireStatus.ACQUIRED}


async def test_a_replayed_call_gets_its_first_answer(store: SessionStore) -> None:
    nonce = new_nonce()
    first = await store.acquire(S, nonce, request_id="a")
    assert await store.acquire(S, nonce, request_id="a") == first
    lease = Lease(S, first.epoch, nonce)
    checkpoint = make_checkpoint(lease)
    assert await store.restore(checkpoint, request_id="r") is WriteStatus.OK
    one = make_round(1, PROMPT, [8])
    assert await store.commit(lease, one, request_id="c") is WriteStatus.OK
    assert await store.commit(lease, one, request_id="c") is WriteStatus.OK
    # The late copy of the checkpoint must not undo the round that came after it.
    assert await store.restore(checkpoint, request_id="r") is WriteStatus.OK
    assert await store.renew(lease, request_id="n") is WriteStatus.OK
    assert await store.release(lease, request_id="l") is WriteStatus.OK
    other = new_nonce()
    taken = await store.acquire(S, other, request_id="b")
    assert taken.epoch == 2
    assert await store.release(lease, request_id="l") is WriteStatus.OK
    assert await store.acquire(S, nonce, request_id="a") == first
    assert await store.acquire(S, other, request_id="b") == taken
    record = await store.read(S)
    assert record is not None
    assert (record.epoch, record.owner_nonce, record.token_ids) == (2, other, (*PROMPT, 8))


async def test_a_replayed_refusal_stays_a_refusal(store: SessionStore) -> None:
    lease = await acquired(store)
    other = new_nonce()
    assert (await store.acquire(S, other, must_be_new=True, request_id="x")).status is AcquireStatus.EXISTS
    await store.release(lease)
    assert (await store.acquire(S, other, must_be_new=True, request_id="x")).status is AcquireStatus.EXISTS
    assert (await store.acquire(S, other, must_be_new=True, request_id="y")).status is AcquireStatus.ACQUIRED


async def test_a_round_that_is_there_is_a_duplicate_only_with_its_own_tokens(store: SessionStore) -> None:
    lease = await opened(store)
    one, two = make_round(1, PROMPT, [8, 9]), make_round(2, [*PROMPT, 8, 9], [10])
    assert await store.commit(lease, one) is WriteStatus.OK
    assert await store.commit(lease, two) is WriteStatus.OK
    assert await store.commit(lease, one) is WriteStatus.DUPLICATE
    assert await store.commit(lease, two) is WriteStatus.DUPLICATE
    assert await store.commit(lease, make_round(1, PROMPT, [8, 7])) is WriteStatus.CONFLICT
    assert await store.commit(lease, make_round(2, [*PROMPT, 8, 9], [11])) is WriteStatus.CONFLICT
    # The same tokens cut into other rounds are another history.
    assert await store.commit(lease, make_round(1, PROMPT, [8, 9, 10])) is WriteStatus.CONFLICT
    assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9, 10])) is WriteStatus.CONFLICT
    # Right digest, wrong tokens.
    assert await store.commit(lease, dataclasses.replace(two, token_ids=(11,))) is WriteStatus.CONFLICT
    record = await store.read(S)
    assert record is not None
    assert (record.round, record.token_ids) == (2, (*PROMPT, 8, 9, 10))


async def test_the_next_round_must_begin_where_the_record_ends(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.GAP
    assert await store.commit(lease, make_round(1, [*PROMPT, 8], [9])) is WriteStatus.GAP
    assert await store.commit(lease, make_round(1, PROMPT[:2], [9])) is WriteStatus.CONFLICT
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK


async def test_rounds_that_travel_together_are_added_in_order_and_once(store: SessionStore) -> None:
    lease = await opened(store)
    one, two = make_round(1, PROMPT, [8, 9]), make_round(2, [*PROMPT, 8, 9], [10])
    three, five = make_round(3, [*PROMPT, 8, 9, 10], [11]), make_round(5, [*PROMPT, 8, 9, 10, 11, 12], [13])
    assert await store.commit(lease, one, two, request_id="c") is WriteStatus.OK
    assert await store.commit(lease, one, two, request_id="c") is WriteStatus.OK
    assert await store.commit(lease, one, two) is WriteStatus.DUPLICATE
    assert await store.commit(lease, two, three) is WriteStatus.OK
    assert await store.commit(lease, make_round(2, [*PROMPT, 8, 9], [7]), three) is WriteStatus.CONFLICT
    four = make_round(4, [*PROMPT, 8, 9, 10, 11], [12])
    assert await store.commit(lease, four, make_round(6, [*PROMPT, 8, 9, 10, 11, 12, 13], [14])) is WriteStatus.GAP
    record = await store.read(S)
    assert record is not None
    assert (record.round, record.token_ids) == (4, (*PROMPT, 8, 9, 10, 11, 12))
    assert record.prefix_digest == four.prefix_digest
    assert await store.commit(lease, five) is WriteStatus.OK


async def test_commits_of_many_sessions_share_round_trips_and_one_that_is_fenced_harms_no_other(
    store: SessionStore,
) -> None:
    leases = [await opened(store, f"s{index}") for index in range(8)]
    leases[3] = dataclasses.replace(leases[3], owner_nonce=new_nonce())
    async with Redis.from_url(store.settings.url) as raw:
        await raw.script_flush()  # a server that was replaced knows no script
    statuses = await asyncio.gather(*(store.commit(lease, make_round(1, PROMPT, [8])) for lease in leases))
    assert statuses[3] is WriteStatus.FENCED
    assert all(status is WriteStatus.OK for index, status in enumerate(statuses) if index != 3)


async def test_another_nonce_of_the_same_epoch_is_fenced(store: SessionStore) -> None:
    lease = await opened(store)
    impostor = dataclasses.replace(lease, owner_nonce=new_nonce())
    assert await store.commit(impostor, make_round(1, PROMPT, [8])) is WriteStatus.FENCED
    assert await store.renew(impostor) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(impostor)) is WriteStatus.FENCED


async def test_a_record_that_is_gone_or_older_is_lost_never_fenced(store: SessionStore) -> None:
    gone = Lease(SessionId("gone"), Epoch(3), new_nonce())
    await opened(store)
    newer = Lease(S, Epoch(9), new_nonce())
    for lease in (gone, newer):
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.LOST
        assert await store.renew(lease) is WriteStatus.LOST
        assert await store.release(lease) is WriteStatus.LOST


async def test_a_store_that_lost_everything_takes_the_owner_back(server: EmbeddedStore, store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
    await server.stop()
    with pytest.raises(StoreUnavailableError):
        await store.commit(lease, make_round(2, [*PROMPT, 8], [9]))
    async with EmbeddedStore(port=server.port, password=server.password):
        assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.LOST
        assert await store.restore(make_checkpoint(lease, [*PROMPT, 8, 9], round_number=2)) is WriteStatus.OK
        assert await store.commit(lease, make_round(3, [*PROMPT, 8, 9], [10])) is WriteStatus.OK
        record = await store.read(S)
        assert record is not None
        assert (record.round, record.token_ids) == (3, (*PROMPT, 8, 9, 10))


async def test_restore_is_taken_with_a_higher_epoch_with_none_and_with_the_records_own(store: SessionStore) -> None:
    gone = Lease(SessionId("gone"), Epoch(4), new_nonce())
    assert await store.restore(make_checkpoint(gone)) is WriteStatus.OK
    lease = await opened(store)
    assert await store.restore(make_checkpoint(lease, [*PROMPT, 8], round_number=1)) is WriteStatus.OK
    higher = Lease(S, Epoch(2), new_nonce())
    assert await store.restore(make_checkpoint(higher)) is WriteStatus.OK
    assert await store.restore(make_checkpoint(lease)) is WriteStatus.FENCED
    assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.FENCED
    assert await store.commit(higher, make_round(1, PROMPT, [3])) is WriteStatus.OK


async def test_an_owners_older_checkpoint_does_not_undo_its_later_round(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
    assert await store.restore(make_checkpoint(lease)) is WriteStatus.DUPLICATE
    record = await store.read(S)
    assert record is not None
    assert record.round == 1


async def test_rounds_begin_again_after_an_acquire(store: SessionStore) -> None:
    first = await opened(store)
    assert await store.commit(first, make_round(1, PROMPT, [8])) is WriteStatus.OK
    await store.release(first)
    second = await acquired(store)
    assert await store.commit(second, make_round(1, [*PROMPT, 8], [9])) is WriteStatus.OK
    assert await store.commit(second, make_round(1, [*PROMPT, 8], [9])) is WriteStatus.DUPLICATE
    assert await store.commit(second, make_round(1, PROMPT, [8])) is WriteStatus.CONFLICT


async def test_a_bump_raises_the_epoch_keeps_the_owner_and_counts_rounds_from_zero(store: SessionStore) -> None:
    old = await opened(store)
    assert await store.commit(old, make_round(1, PROMPT, [8])) is WriteStatus.OK
    assert await store.bump(old) == BumpReply(WriteStatus.OK, Epoch(2))
    new = dataclasses.replace(old, epoch=Epoch(2))
    record = await store.read(S)
    assert record is not None
    assert (record.epoch, record.owner_nonce, record.round) == (2, old.owner_nonce, 0)
    assert (record.state, record.token_ids) == (RecordState.OPEN, (*PROMPT, 8))
    assert await store.commit(old, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(old)) is WriteStatus.FENCED
    assert await store.commit(new, make_round(1, [*PROMPT, 8], [9])) is WriteStatus.OK
    assert await store.commit(new, make_round(1, [*PROMPT, 8], [9])) is WriteStatus.DUPLICATE
    assert await store.bump(new) == BumpReply(WriteStatus.OK, Epoch(3))


async def test_a_bump_that_is_sent_twice_is_one_bump(store: SessionStore) -> None:
    lease = await opened(store)
    first = await store.bump(lease, request_id="b")
    assert await store.bump(lease, request_id="b") == first
    assert await store.bump(lease) == BumpReply(WriteStatus.FENCED, first.epoch)


async def test_a_bump_of_another_owner_is_fenced_and_one_of_a_forgotten_record_is_lost(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.bump(dataclasses.replace(lease, owner_nonce=new_nonce())) == BumpReply(
        WriteStatus.FENCED, Epoch(1)
    )
    assert await store.bump(dataclasses.replace(lease, epoch=Epoch(9))) == BumpReply(WriteStatus.LOST, Epoch(1))
    gone = Lease(SessionId("gone"), Epoch(3), new_nonce())
    assert await store.bump(gone) == BumpReply(WriteStatus.LOST, Epoch(0))
    # What the owner then does: the checkpoint under its next epoch is the bump.
    assert await store.restore(make_checkpoint(dataclasses.replace(gone, epoch=Epoch(4)))) is WriteStatus.OK
    assert await store.commit(gone, make_round(1, PROMPT, [8])) is WriteStatus.FENCED


async def test_a_bump_renews_the_lease(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, lease_s=SHORT_LEASE_S)) as short:
        lease = await opened(short)
    async with SessionStore(StoreSettings(server.url)) as store:
        assert (await store.bump(lease)).status is WriteStatus.OK
        reply = await store.reap(S)
        assert reply.status is ReapStatus.LIVE
        assert reply.lease_remaining_s > SHORT_LEASE_S


async def test_rounds_before_a_restore_are_compared_by_their_tokens(store: SessionStore) -> None:
    lease = await opened(store)
    await store.restore(make_checkpoint(lease, [*PROMPT, 8, 9], round_number=2))
    assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.DUPLICATE
    assert await store.commit(lease, make_round(2, [*PROMPT, 8], [7])) is WriteStatus.CONFLICT


async def test_without_tokens_the_record_holds_none_and_duplicates_are_told_by_digest(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, store_tokens=False)) as store:
        lease = await opened(store)
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
        assert await store.commit(lease, make_round(2, [*PROMPT, 8], [9])) is WriteStatus.OK
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.DUPLICATE
        assert await store.commit(lease, make_round(1, PROMPT, [7])) is WriteStatus.CONFLICT
        record = await store.read(S)
        assert record is not None
        assert (record.token_ids, record.committed_length) == (None, 5)
        assert record.prefix_digest == digest_tokens([*PROMPT, 8, 9])


async def test_a_record_is_gone_after_its_ttl_and_a_renewal_prolongs_it(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, session_ttl_s=0.4)) as store:
        lease = await opened(store)
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            assert await store.renew(lease) is WriteStatus.OK
            await asyncio.sleep(0.05)

        async def gone() -> bool:
            return await store.read(S) is None

        await eventually(gone)
        assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.LOST


async def test_a_cancelled_session_is_deleted_and_its_owner_cannot_bring_it_back(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.cancel(S, request_id="k")
    assert await store.cancel(S, request_id="k")
    assert not await store.cancel(S)
    assert not await store.cancel(SessionId("none"))
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.FENCED
    assert await store.restore(make_checkpoint(lease)) is WriteStatus.FENCED
    record = await store.read(S)
    assert record is not None
    assert (record.state, record.token_ids, record.request) == (RecordState.CANCELLED, None, None)
    reply = await store.acquire(S, new_nonce(), must_be_new=True)
    assert (reply.status, reply.epoch) == (AcquireStatus.ACQUIRED, 3)


async def test_a_server_that_does_not_answer_is_reported_in_time() -> None:
    stuck = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = stuck.sockets[0].getsockname()[1]
    async with SessionStore(StoreSettings(f"redis://127.0.0.1:{port}/0", call_timeout_s=0.2)) as store:
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.acquire(S, new_nonce())
        assert time.monotonic() - began < 1.0
    stuck.close()


async def test_a_claim_that_nobody_opened_cannot_be_finished_and_takes_no_commit(store: SessionStore) -> None:
    lease = await acquired(store)
    assert await store.release(lease, FinishReason.LENGTH) is WriteStatus.OK
    record = await store.read(S)
    assert record is not None
    assert record.state is RecordState.CLAIMED
    assert await store.commit(lease, make_round(1, [], [8])) is WriteStatus.LOST


async def test_a_claim_is_cancelled_by_its_own_tenant_alone_before_anybody_opened_it(store: SessionStore) -> None:
    reply = await store.acquire(S, new_nonce(), must_be_new=True, tenant="owner")
    assert not await store.cancel(S, "thief")
    assert not await store.cancel(S, "")
    record = await store.read(S)
    assert record is not None
    assert (record.epoch, record.state) == (reply.epoch, RecordState.CLAIMED)
    assert await store.read(S, "thief") is None
    assert await store.cancel(S, "owner")


async def test_a_name_that_was_cancelled_or_never_opened_is_the_next_claims_tenants(store: SessionStore) -> None:
    await store.acquire(S, new_nonce(), tenant="first")
    await store.acquire(S, new_nonce(), tenant="second")
    assert not await store.cancel(S, "first")
    assert await store.cancel(S, "second")
    await store.acquire(S, new_nonce(), tenant="third")
    assert await store.cancel(S, "third")
