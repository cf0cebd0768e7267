"""What is written to the store, and how often."""

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

    async def restore(self, checkpoint: object) -> WriteStatus:
        self.calls.append("restore")
        return WriteStatus.OK

    async def commit(self, lease: Lease, committed: CommittedRound) -> WriteStatus:
        self.calls.append("commit")
        return WriteStatus.OK

    async def release(self, lease: Lease, finish_reason: FinishReason | None) -> None:
        self.calls.append("release")


def committed(number: int) -> CommittedRound:
    return CommittedRound(Round(number), number, (1,), b"", number, 0, "")


async def written_at_the_end(num_pending: int) -> list[str]:
    store = CountingStore()
    newest = SimpleNamespace(round=Round(0))
    writer = RecordWriter(store, LEASE, lambda: newest)  # type: ignore[arg-type]
    await writer.flush()
    for number in range(1, num_pending + 1):
        writer.push(committed(number))
        newest.round = Round(number)
    await writer.close(FinishReason.LENGTH)
    return store.calls


async def test_a_session_that_ends_with_many_commits_pending_writes_one_checkpoint_for_them_all():
    assert await written_at_the_end(40) == ["restore", "restore", "release"]


async def test_a_session_that_ends_with_few_commits_pending_writes_those():
    assert await written_at_the_end(2) == ["restore", "commit", "commit", "release"]
