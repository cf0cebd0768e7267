"""The session scripts against a small model of them: two owners and a reaper that call in any order, call again, and
meet a server that loses its last writes or everything. The server is a real one."""

import asyncio
import copy
import dataclasses
import secrets
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from redis.asyncio import Redis

from orchestrator.record import RecordState
from orchestrator.session_store import (
    AcquireReply,
    AcquireStatus,
    BumpReply,
    Lease,
    ReapStatus,
    SessionStore,
    StoreSettings,
    WriteStatus,
)
from specdec.ids import Epoch, Round, SessionId, digest_tokens
from specdec.params import FinishReason
from tests.system.store_fixtures import make_checkpoint, make_round
from tests.system.store_servers import StoreServer

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),  # some thousands of calls, each after the other, on whatever else the machine does
]

S = SessionId("s")
NONCES = (b"a" * 16, b"b" * 16)
Answer = TypeVar("Answer")
Claimant = tuple[int, int] | None
Entry = tuple[int, tuple[int, ...]]
"""Where a round ended, and everything before it."""

owners = st.sampled_from(range(len(NONCES)))
claimants = st.just(None) | st.tuples(owners, st.integers(-2, 2))
"""The record's owner, or one of the two with an epoch that is near the record's."""
prefixes = st.lists(st.integers(1, 2), min_size=1, max_size=4)


@dataclasses.dataclass
class ModelRecord:
    epoch: int
    nonce: bytes
    state: RecordState = RecordState.CLAIMED
    leased: bool = True
    round: int = 0
    tokens: tuple[int, ...] = ()
    entries: list[Entry] = dataclasses.field(default_factory=list)
    start_round: int = 0
    start_length: int = 0
    start_index: int = 0
    stores: bool = False
    abandoned: bool = False

    def count_from_zero(self) -> None:
        self.round = self.start_round = 0
        self.start_length, self.start_index = len(self.tokens), len(self.entries)


class Model:
    """What the scripts do, as design section 7 has it."""

    def __init__(self, *, compares_tokens: bool) -> None:
        self.compares_tokens = compares_tokens
        self.record: ModelRecord | None = None

    def acquire(self, nonce: bytes, floor: int, must_be_new: bool) -> tuple[AcquireStatus, int]:
        record = self.record
        if record is not None and record.nonce != nonce:
            in_use = record.leased or record.state in (RecordState.OPEN, RecordState.FINISHED)
            if must_be_new and in_use:
                return AcquireStatus.EXISTS, record.epoch
        elif record is not None and record.state is RecordState.OPEN and floor < record.epoch:
            return AcquireStatus.ACQUIRED, record.epoch
        if record is None or record.state is RecordState.CANCELLED:
            record = ModelRecord(record.epoch if record is not None else 0, nonce)
        record.epoch, record.nonce, record.leased, record.abandoned = max(record.epoch, floor) + 1, nonce, True, False
        record.count_from_zero()
        self.record = record
        return AcquireStatus.ACQUIRED, record.epoch

    def denial(self, lease: Lease) -> WriteStatus | None:
        if self.record is None or self.record.epoch < lease.epoch:
            return WriteStatus.LOST
        if self.record.epoch > lease.epoch or self.record.nonce != lease.owner_nonce:
            return WriteStatus.FENCED
        return None

    def owned(self, lease: Lease) -> ModelRecord:
        assert self.denial(lease) is None
        assert self.record is not None
        return self.record

    def bump(self, lease: Lease) -> BumpReply:
        if (denial := self.denial(lease)) is not None:
            return BumpReply(denial, Epoch(self.record.epoch if self.record is not None else 0))
        record = self.owned(lease)
        record.epoch, record.leased, record.abandoned = record.epoch + 1, True, False
        record.count_from_zero()
        return BumpReply(WriteStatus.OK, Epoch(record.epoch))

    def renew(self, lease: Lease) -> WriteStatus:
        if (denial := self.denial(lease)) is not None:
            return denial
        record = self.owned(lease)
        record.leased, record.abandoned = True, False
        return WriteStatus.OK

    def release(self, lease: Lease, finished: bool) -> WriteStatus:
        if (denial := self.denial(lease)) is not None:
            return denial
        record = self.owned(lease)
        record.leased = False
        if finished and record.state is not RecordState.CLAIMED:
            record.state = RecordState.FINISHED
        return WriteStatus.OK

    def cancel(self) -> bool:
        if self.record is None or self.record.state is RecordState.CANCELLED:
            return False
        self.record = ModelRecord(self.record.epoch + 1, b"", RecordState.CANCELLED, leased=False)
        return True

    def restore(self, lease: Lease, round_number: int, tokens: tuple[int, ...]) -> WriteStatus:
        record = self.record
        if record is not None and record.epoch > lease.epoch:
            return WriteStatus.FENCED
        if record is not None and record.epoch == lease.epoch:
            if record.nonce != lease.owner_nonce:
                return WriteStatus.FENCED
            if record.round > round_number:
                return WriteStatus.DUPLICATE
        own = record is not None and record.nonce == lease.owner_nonce
        entries = _kept(record.entries if record is not None and own else [], tokens)
        self.record = ModelRecord(lease.epoch, lease.owner_nonce, RecordState.OPEN, True, round_number, tokens, entries)
        self.record.start_round, self.record.start_length = round_number, len(tokens)
        self.record.start_index, self.record.stores = len(entries), True
        return WriteStatus.OK

    def commit(self, lease: Lease, number: int, prefix: tuple[int, ...], tokens: tuple[int, ...]) -> WriteStatus:
        if (denial := self.denial(lease)) is not None:
            return denial
        record, base = self.owned(lease), len(prefix)
        if record.state is RecordState.CLAIMED:
            return WriteStatus.LOST
        entry = (base + len(tokens), prefix + tokens)
        if number > record.round + 1 or (number == record.round + 1 and base > len(record.tokens)):
            return WriteStatus.GAP
        if number <= record.round:
            return (
                WriteStatus.DUPLICATE if self._is_there(record, number, base, tokens, entry) else WriteStatus.CONFLICT
            )
        if base < len(record.tokens):
            return WriteStatus.CONFLICT
        record.round, record.tokens = number, record.tokens + tokens
        record.entries.append(entry)
        return WriteStatus.OK

    def _is_there(self, record: ModelRecord, number: int, base: int, tokens: tuple[int, ...], entry: Entry) -> bool:
        if self.compares_tokens and record.stores and record.tokens[base : base + len(tokens)] != tokens:
            return False
        if number <= record.start_round:
            return (self.compares_tokens and record.stores) or entry in record.entries[: record.start_index]
        index = record.start_index + number - record.start_round - 1
        start = record.start_length if number == record.start_round + 1 else record.entries[index - 1][0]
        return start == base and record.entries[index] == entry

    def reap(self) -> ReapStatus:
        record = self.record
        if record is None or record.state not in (RecordState.CLAIMED, RecordState.OPEN):
            return ReapStatus.GONE
        if record.leased:
            return ReapStatus.LIVE
        if record.state is RecordState.CLAIMED:
            self.record = None
            return ReapStatus.FREED
        record.abandoned = True
        return ReapStatus.ABANDONED


def _kept(entries: Sequence[Entry], tokens: tuple[int, ...]) -> list[Entry]:
    """An owner's own ends of rounds, as far as the checkpoint goes and unless it says otherwise."""
    here = (len(tokens), tokens)
    if any(entry[0] == len(tokens) and entry != here for entry in entries):
        return [here]
    return [entry for entry in entries if entry[0] < len(tokens)] + [here]


class Server:
    """One for all examples, with a loop of its own."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    store: ClassVar[SessionStore]
    raw: ClassVar["Redis"]

    @classmethod
    def run(cls, call: Awaitable[Answer]) -> Answer:
        return cls.loop.run_until_complete(asyncio.wait_for(call, 10.0))


class ScriptsAndModel(RuleBasedStateMachine):
    compares_tokens = True

    @initialize()
    def begin(self) -> None:
        Server.run(Server.raw.flushall())
        self.model = Model(compares_tokens=self.compares_tokens)
        self.calls: list[tuple[Any, Any]] = []
        """How to make each call again, and its answer."""
        self.acquire(0, 0, must_be_new=True)
        self.restore(None, 0, [1, 2], as_recorded=False)
        self.snapshot: tuple[dict[bytes, bytes], ModelRecord | None, list[tuple[Any, Any]]] | None = None

    def call(self, make: Any, expected: Any) -> None:
        request_id = secrets.token_hex(8)
        answer = Server.run(make(request_id))
        assert _without_time(answer) == expected
        self.calls.append((lambda: make(request_id), answer))

    @rule(owner=owners, floor=st.integers(0, 3), must_be_new=st.booleans())
    def acquire(self, owner: int, floor: int, must_be_new: bool) -> None:
        expected = self.model.acquire(NONCES[owner], floor, must_be_new)
        self.call(
            lambda request_id: Server.store.acquire(
                S, NONCES[owner], epoch_floor=floor, must_be_new=must_be_new, request_id=request_id
            ),
            expected,
        )

    @rule(who=claimants)
    def bump(self, who: Claimant) -> None:
        lease = self.lease(who)
        expected = self.model.bump(lease)
        self.call(lambda name: Server.store.bump(lease, request_id=name), expected)

    @rule(who=claimants)
    def renew(self, who: Claimant) -> None:
        lease = self.lease(who)
        expected = self.model.renew(lease)
        self.call(lambda name: Server.store.renew(lease, request_id=name), expected)

    @rule(who=claimants, finished=st.booleans())
    def release(self, who: Claimant, finished: bool) -> None:
        lease, reason = self.lease(who), FinishReason.LENGTH if finished else None
        expected = self.model.release(lease, finished)
        self.call(lambda name: Server.store.release(lease, reason, request_id=name), expected)

    @rule(who=claimants, round_number=st.integers(0, 3), tokens=prefixes, as_recorded=st.booleans())
    def restore(self, who: Claimant, round_number: int, tokens: list[int], as_recorded: bool) -> None:
        lease, record = self.lease(who), self.model.record
        if as_recorded and record is not None and record.tokens:
            tokens = list(record.tokens)
        checkpoint = make_checkpoint(lease, tokens, round_number=round_number)
        expected = self.model.restore(lease, round_number, tuple(tokens))
        self.call(lambda name: Server.store.restore(checkpoint, request_id=name), expected)

    @rule(tokens=prefixes)
    def the_owner_commits(self, tokens: list[int]) -> None:
        record = self.model.record
        if record is not None:
            self.commit_round(self.lease(None), record.round + 1, record.tokens, tuple(tokens))

    @rule(who=claimants, ahead=st.integers(-2, 2), num_missing=st.integers(-1, 2), tokens=prefixes)
    def commit(self, who: Claimant, ahead: int, num_missing: int, tokens: list[int]) -> None:
        """Near the record's next round and its end."""
        record = self.model.record
        known, number = (record.tokens, record.round) if record is not None else ((), 0)
        prefix = (*known, 1)[: max(0, len(known) - num_missing)]
        self.commit_round(self.lease(who), max(1, number + 1 + ahead), prefix, tuple(tokens))

    @precondition(lambda self: self.model.record is not None and len(self.model.record.entries) > 0)
    @rule(back=st.integers(1, 3), cut=st.integers(0, 1))
    def commit_once_more(self, back: int, cut: int) -> None:
        """A round that is there, or, with a token moved, almost."""
        record = self.model.record
        assert record is not None
        number = max(1, record.round + 1 - back)
        index = record.start_index + number - record.start_round - 1
        if 0 <= index < len(record.entries):
            end, everything = record.entries[index]
            start = record.entries[index - 1][0] if index > 0 else max(0, end - 1)
            start = max(0, start - cut)
            self.commit_round(self.lease(None), number, everything[:start], everything[start:end])

    def commit_round(self, lease: Lease, number: int, prefix: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        if not lease.owner_nonce or not tokens:
            return
        if self.model.denial(lease) is None and len(prefix) == len(self.model.owned(lease).tokens):
            prefix = self.model.owned(lease).tokens  # an owner's digest is of what it committed
        expected = self.model.commit(lease, number, prefix, tokens)
        committed = make_round(number, prefix, tokens)
        self.call(lambda name: Server.store.commit(lease, committed, request_id=name), expected)

    @precondition(lambda self: len(self.calls) % 7 == 6)  # not too often: little happens afterwards
    @rule()
    def cancel(self) -> None:
        expected = self.model.cancel()
        self.call(lambda name: Server.store.cancel(S, request_id=name), expected)

    @rule()
    def reap(self) -> None:
        expected = self.model.reap()
        assert Server.run(Server.store.reap(S)).status is expected

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def a_call_is_made_again(self, data: st.DataObject) -> None:
        make, answer = data.draw(st.sampled_from(self.calls[-20:]))
        assert Server.run(make()) == answer

    @precondition(lambda self: self.model.record is not None)
    @rule()
    def the_lease_runs_out(self) -> None:
        assert self.model.record is not None
        self.model.record.leased = False
        Server.run(Server.raw.hset("specdec:{s}:record", "lease_expires_ms", "1"))

    @precondition(lambda self: len(self.calls) % 3 == 2)
    @rule()
    def the_server_writes_to_its_disk(self) -> None:
        keys = Server.run(Server.raw.keys("specdec:{s}:*"))
        dumps = {key: Server.run(Server.raw.dump(key)) for key in keys}
        self.snapshot = (dumps, copy.deepcopy(self.model.record), list(self.calls))

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def the_server_loses_what_came_after(self) -> None:
        assert self.snapshot is not None
        dumps, record, self.calls = self.snapshot[0], copy.deepcopy(self.snapshot[1]), list(self.snapshot[2])
        self.model.record = record
        Server.run(Server.raw.flushall())
        for key, dump in dumps.items():
            Server.run(Server.raw.restore(key, 600_000, dump))

    @precondition(lambda self: len(self.calls) % 7 == 5)
    @rule()
    def the_server_loses_everything(self) -> None:
        Server.run(Server.raw.flushall())
        self.model.record, self.calls = None, []

    @invariant()
    def the_record_is_the_models(self) -> None:
        found, expected = Server.run(Server.store.read(S)), self.model.record
        if expected is None:
            assert found is None
            return
        assert found is not None
        assert (found.epoch, found.owner_nonce, found.state) == (expected.epoch, expected.nonce, expected.state)
        assert (found.round, found.committed_length) == (Round(expected.round), len(expected.tokens))
        assert found.abandoned == expected.abandoned
        if found.token_ids is not None:
            assert found.token_ids == expected.tokens
        if expected.state is not RecordState.CANCELLED:
            ends = [(end, found.kept_digest(digest_tokens(tokens))[:12]) for end, tokens in expected.entries]
            assert list(found.borders) == ends
            assert found.agrees_with(expected.tokens)

    def lease(self, who: Claimant) -> Lease:
        record = self.model.record
        if who is None and record is not None and record.nonce:
            return Lease(S, Epoch(record.epoch), record.nonce)
        owner, difference = who or (0, 0)
        return Lease(S, Epoch(max(1, (record.epoch if record is not None else 1) + difference)), NONCES[owner])


def _without_time(answer: Any) -> Any:
    return (answer.status, answer.epoch) if isinstance(answer, AcquireReply) else answer


@pytest.mark.parametrize("kind", ["plain", "sealed", "no tokens"])
def test_the_scripts_do_what_the_model_does(kind: str) -> None:
    class Machine(ScriptsAndModel):
        compares_tokens = kind == "plain"

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(secrets.token_bytes(32).hex())
        server = StoreServer(Path(folder) / "server")
        Server.loop = asyncio.new_event_loop()
        try:
            Server.run(server.start())
            Server.raw = server.client()
            Server.store = SessionStore(
                StoreSettings(
                    server.url,
                    lease_s=1000.0,
                    session_ttl_s=2000.0,
                    store_tokens=kind != "no tokens",
                    token_key_file=keys if kind == "sealed" else None,
                )
            )
            Machine.TestCase.settings = settings(
                max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
            )
            Machine.TestCase().runTest()
            Server.run(Server.store.close())
            Server.run(Server.raw.aclose())
        finally:
            server.kill()
            Server.loop.close()
