"""What is written to the store, and how often."""

import asyncio
from types import SimpleNamespace

from orchestrator.record import CommittedRound
from orchestrator.record_writer import RecordWriter
from orchestrator.session_store import Lease, WriteStatus
from specdec.ids import Epoch, Round, SessionId
from specdec.params import FinishReason

LEASE = Lease(SessionId("s"), Epoch(1), b"n" * 16)


class CountingStore:
    """Takes every write."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.commit_status = WriteStatus.OK
        self.answering = asyncio.Event()
        self.answering.set()
        self.renewed = asyncio.Event()
        self.settings = SimpleNamespace(renewal_interval_s=3.0)

    async def restore(self, checkpoint: object) -> WriteStatus:
        self.calls.append("restore")
        return WriteStatus.OK

    async def commit(self, lease: Lease, *rounds: CommittedRound) -> WriteStatus:
        self.calls.append("commit " + " ".join(str(committed.round) for committed in rounds))
        await self.answering.wait()
        return self.commit_status

    async def renew(self, lease: Lease) -> WriteStatus:
        self.calls.append("renew")
        self.renewed.set()
        return WriteStatus.OK

    async def release(self, lease: Lease, finish_reason: FinishReason | None) -> None:
        self.calls.append("release")


def committed(number: int) -> CommittedRound:
    return CommittedRound(Round(number), number, (1,), b"", number, 0, "")


def new_writer(store: CountingStore) -> RecordWriter:
    return RecordWriter(store, LEASE, lambda: SimpleNamespace(round=Round(0)))  # type: ignore[arg-type,return-value]


async def test_a_session_that_ends_with_commits_pending_writes_them_at_once_and_in_order():
    store = CountingStore()
    writer = new_writer(store)
    await writer.flush()
    for number in range(1, 6):
        writer.push(committed(number))
    await writer.close(FinishReason.LENGTH)
    assert store.calls == ["restore", "commit 1 2 3 4 5", "release"]


async def test_what_the_store_forgot_is_not_restored_once_the_client_is_gone():
    store = CountingStore()
    writer = new_writer(store)
    await writer.flush()
    store.commit_status = WriteStatus.LOST
    writer.push(committed(1))
    await writer.close(None)
    assert store.calls == ["restore", "commit 1", "release"]


async def test_an_output_that_ends_before_its_first_write_leaves_a_record():
    store = CountingStore()
    await new_writer(store).close(None)
    assert store.calls == ["restore", "release"]


async def test_rounds_that_come_while_a_commit_is_on_its_way_travel_together_in_the_next():
    store = CountingStore()
    writer = new_writer(store)
    await writer.flush()
    store.answering.clear()
    writing = asyncio.create_task(writer.run())
    for number in range(1, 5):
        writer.push(committed(number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    store.answering.set()
    await writer.flush()
    writing.cancel()
    assert store.calls == ["restore", "commit 1", "commit 2 3 4"]


async def test_what_is_flushed_is_in_the_store_when_flush_returns():
    store = CountingStore()
    writer = new_writer(store)
    await writer.flush()
    store.answering.clear()
    writer.push(committed(1))
    flushing = asyncio.create_task(writer.flush())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not flushing.done()
    store.answering.set()
    await flushing
    assert store.calls == ["restore", "commit 1"]


async def test_the_lease_of_a_session_that_commits_nothing_is_renewed_again_and_again():
    store = CountingStore()
    store.settings.renewal_interval_s = 0.01
    writing = asyncio.create_task(new_writer(store).run())
    async with asyncio.timeout(10):
        for _ in range(3):
            await store.renewed.wait()
            store.renewed.clear()
    writing.cancel()
    assert store.calls == ["restore", "renew", "renew", "renew"]
