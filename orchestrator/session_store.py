"""Sessions' records in Redis, or in servers that speak its protocol.

Knows leases, epochs and rounds as numbers to compare; knows nothing of streams, verifiers or what a token means, and of
Redis only its scripts. Every change is one Lua script, atomic and idempotent by request id, because calls are retried.
"""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from orchestrator.lease_index import LeaseIndex
from orchestrator.record import Checkpoint, CommittedRound, SessionRecord, checkpoint_fields, decode_record, record_keys
from orchestrator.sealing import RecordSeal, read_key_file
from orchestrator.store_client import Argument, StoreClient
from specdec.ids import Epoch, SessionId
from specdec.params import FinishReason

_SESSION_SCRIPTS = ("acquire", "bump", "renew", "release", "commit", "restore", "cancel", "read", "reap")
_SHARED_SCRIPTS = ("index_add", "index_due", "index_settle", "drained_set", "drained_read")
_RENEWALS_PER_LEASE = 3
_DRAINED_KEY = "specdec:drained"
_DRAINED_TTL_S = 7 * 86_400.0
"""A drain is forgotten when no orchestrator has asked for so long."""


class AcquireStatus(Enum):
    ACQUIRED = "ACQUIRED"
    EXISTS = "EXISTS"  # it was to be new, and is not


class WriteStatus(Enum):
    OK = "OK"
    DUPLICATE = "DUPLICATE"  # the round is there with these tokens
    CONFLICT = "CONFLICT"  # the round is there with others
    FENCED = "FENCED"  # another owner holds the session
    GAP = "GAP"  # rounds before this one are missing
    LOST = "LOST"  # the store forgot what this owner wrote: it may restore


class ReapStatus(Enum):
    LIVE = "LIVE"  # its lease runs
    FREED = "FREED"  # claimed and never opened: nothing is left of it
    ABANDONED = "ABANDONED"  # opened, and without an owner: resumable for a while longer
    GONE = "GONE"  # finished, cancelled or expired


@dataclasses.dataclass(frozen=True)
class Lease:
    """Who claims to own a session: compared by every script."""

    session_id: SessionId
    epoch: Epoch
    owner_nonce: bytes


@dataclasses.dataclass(frozen=True)
class AcquireReply:
    """`epoch` is the new one with ACQUIRED, else the record's."""

    status: AcquireStatus
    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class BumpReply:
    """`epoch` is the new one with OK, else the record's, 0 where there is none."""

    status: WriteStatus
    epoch: Epoch


class ReapReply(NamedTuple):
    """`lease_remaining_s` only with LIVE."""

    status: ReapStatus
    lease_remaining_s: float


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """`url`: see store_connection.py. With a `token_key_file` the text of records is sealed: see sealing.py."""

    url: str = dataclasses.field(repr=False)
    lease_s: float = 10.0
    session_ttl_s: float = 600.0
    abandoned_ttl_s: float = 600.0
    store_tokens: bool = True
    call_timeout_s: float = 1.0
    token_key_file: Path | None = None

    @property
    def renewal_interval_s(self) -> float:
        """How often an owner renews: two renewals may fail before its lease is over."""
        return self.lease_s / _RENEWALS_PER_LEASE


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


class SessionStore:
    """Every method raises StoreUnavailableError where the server does not answer in time.

    A `request_id` names a call across retries: the same one is answered the same. Without it each call is a new one,
    and only the retries within it share an id. Making one raises InvalidParameterError for a URL that is none,
    UnusableFileError for a key file without sound keys, OSError for one that cannot be read.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self._seal = RecordSeal(read_key_file(settings.token_key_file) if settings.token_key_file is not None else ())
        self._client = StoreClient(settings.url, _scripts(), call_timeout_s=settings.call_timeout_s)
        self.lease_index = LeaseIndex(self._client, ttl_s=settings.session_ttl_s + settings.lease_s)

    async def acquire(
        self,
        session_id: SessionId,
        owner_nonce: bytes,
        *,
        epoch_floor: int = 0,
        must_be_new: bool = False,
        tenant: str = "",
        request_id: str | None = None,
    ) -> AcquireReply:
        """Claims a session, from another owner too: epoch = max(record's, epoch_floor) + 1.

        One that must be new is claimed where its id is free: no record, or a claim that was never opened and whose
        lease has run out. A claim of the record's own owner that comes late changes no epoch; see lua/acquire.lua.
        """
        status, epoch = await self._run(
            "acquire",
            session_id,
            [
                owner_nonce.hex(),
                str(epoch_floor),
                _milliseconds(self.settings.lease_s),
                _milliseconds(self.settings.session_ttl_s),
                "1" if must_be_new else "0",
                tenant,
            ],
            request_id,
        )
        reply = AcquireReply(AcquireStatus(status.decode()), Epoch(int(epoch)))
        if reply.status is AcquireStatus.ACQUIRED:
            self.lease_index.note(session_id, self.settings.lease_s)
        return reply

    async def bump(self, lease: Lease, *, request_id: str | None = None) -> BumpReply:
        """The same owner goes on under the next epoch, with its rounds counted from 0.

        Fences what still runs under the old one and renews the lease. OK, FENCED or LOST. After LOST a `restore` under
        a higher epoch does the same.
        """
        status, epoch = await self._run(
            "bump",
            lease.session_id,
            [
                str(lease.epoch),
                lease.owner_nonce.hex(),
                _milliseconds(self.settings.lease_s),
                _milliseconds(self.settings.session_ttl_s),
            ],
            request_id,
        )
        reply = BumpReply(WriteStatus(status.decode()), Epoch(int(epoch)))
        if reply.status is WriteStatus.OK:
            self.lease_index.note(lease.session_id, self.settings.lease_s)
        return reply

    async def renew(self, lease: Lease, *, request_id: str | None = None) -> WriteStatus:
        """Prolongs the lease and the record's life. OK, FENCED or LOST."""
        arguments = [_milliseconds(self.settings.lease_s), _milliseconds(self.settings.session_ttl_s)]
        status = await self._write("renew", lease, arguments, request_id)
        if status is WriteStatus.OK:
            self.lease_index.note(lease.session_id, self.settings.lease_s)
        return status

    async def release(
        self, lease: Lease, finish_reason: FinishReason | None = None, *, request_id: str | None = None
    ) -> WriteStatus:
        """Gives the lease back; the record stays until its TTL. OK, FENCED or LOST."""
        reason = finish_reason.value if finish_reason is not None else ""
        return await self._write("release", lease, [_milliseconds(self.settings.session_ttl_s), reason], request_id)

    async def commit(self, lease: Lease, *rounds: CommittedRound, request_id: str | None = None) -> WriteStatus:
        """Adds the tokens of rounds that follow one another. Any of the statuses; see lua/commit.lua.

        Commits of several sessions share a round trip while the server is at work on others.
        """
        last = rounds[-1]
        codec = self._seal.writing(lease.session_id)
        arguments: list[Argument] = [
            request_id or uuid.uuid4().hex,
            str(lease.epoch),
            lease.owner_nonce.hex(),
            str(last.verifier_cached_length),
            str(last.drafter_cached_length),
            last.drafter,
            _milliseconds(self.settings.session_ttl_s),
        ]
        for committed in rounds:
            stored = self.settings.store_tokens and len(committed.token_ids) > 0
            arguments += (
                str(committed.round),
                str(committed.base_position),
                str(len(committed.token_ids)),
                codec.seal_tokens(committed.base_position, committed.token_ids) if stored else b"",
                codec.kept_digest(committed.prefix_digest),
            )
        status, _ = await self._client.evaluate("commit", record_keys(lease.session_id), arguments)
        return WriteStatus(status.decode())

    async def restore(self, checkpoint: Checkpoint, *, request_id: str | None = None) -> WriteStatus:
        """Writes the whole record: after Opened, and after LOST. OK, DUPLICATE (a later round is there) or FENCED."""
        codec = self._seal.writing(checkpoint.session_id)
        arguments: list[Argument] = [
            str(checkpoint.round),
            str(len(checkpoint.token_ids)),
            _milliseconds(self.settings.lease_s),
            _milliseconds(self.settings.session_ttl_s),
            "1" if self.settings.store_tokens else "0",
            codec.seal_tokens(0, checkpoint.token_ids) if self.settings.store_tokens else b"",
            codec.kept_digest(checkpoint.prefix_digest),
        ]
        for name, value in checkpoint_fields(checkpoint, codec).items():
            arguments += [name, value]
        lease = Lease(checkpoint.session_id, checkpoint.epoch, checkpoint.owner_nonce)
        status = await self._write("restore", lease, arguments, request_id)
        if status is WriteStatus.OK:
            self.lease_index.note(checkpoint.session_id, self.settings.lease_s)
        return status

    async def cancel(self, session_id: SessionId, tenant: str | None = None, *, request_id: str | None = None) -> bool:
        """Deletes a session and fences its owner. False where there was none, or none of this tenant; None: of any."""
        whose = ["0", ""] if tenant is None else ["1", tenant]
        arguments = [_milliseconds(self.settings.session_ttl_s), *whose]
        status, _ = await self._run("cancel", session_id, arguments, request_id)
        return WriteStatus(status.decode()) is WriteStatus.OK

    async def read(self, session_id: SessionId, tenant: str | None = None) -> SessionRecord | None:
        """The record as it is now, None where there is none, or none of this tenant; None: of any.

        Another tenant's is not opened: without the key that would be told, and with it that there is such a session.

        Raises:
            RecordUnreadableError: it was written over, or sealed with a key that is not here.
        """
        pairs, tokens, rounds = await self._run("read", session_id, [], None)
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        if not fields or (tenant is not None and fields.get(b"tenant", b"") != tenant.encode()):
            return None
        return decode_record(
            fields,
            tokens,
            rounds,
            lambda sealed_by: self._seal.reading(session_id, sealed_by),
        )

    async def reap(self, session_id: SessionId) -> ReapReply:
        """Frees or marks a session that nobody owns, by the store's own clock; see lua/reap.lua."""
        arguments = [_milliseconds(self.settings.abandoned_ttl_s)]
        status, remaining_ms = await self._run("reap", session_id, arguments, None)
        return ReapReply(ReapStatus(status.decode()), int(remaining_ms) / 1000)

    async def set_drained(self, endpoint: str, *, drained: bool) -> None:
        """For all orchestrators of this store: whether an operator wants the endpoint without new work."""
        arguments = [endpoint, "1" if drained else "0", _milliseconds(_DRAINED_TTL_S)]
        await self._client.evaluate("drained_set", [_DRAINED_KEY], arguments)

    async def read_drained(self) -> frozenset[str]:
        """The endpoints that are drained. A drain lasts as long as somebody asks within a week."""
        endpoints = await self._client.evaluate("drained_read", [_DRAINED_KEY], [_milliseconds(_DRAINED_TTL_S)])
        return frozenset(endpoint.decode() for endpoint in endpoints)

    async def is_reachable(self) -> bool:
        return await self._client.is_reachable()

    async def close(self) -> None:
        await self.lease_index.close()
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _write(
        self, script: str, lease: Lease, arguments: Sequence[Argument], request_id: str | None
    ) -> WriteStatus:
        owner = [str(lease.epoch), lease.owner_nonce.hex()]
        status, _ = await self._run(script, lease.session_id, [*owner, *arguments], request_id)
        return WriteStatus(status.decode())

    async def _run(
        self, script: str, session_id: SessionId, arguments: Sequence[Argument], request_id: str | None
    ) -> Any:
        identified = [request_id or uuid.uuid4().hex, *arguments]
        return await self._client.evaluate(script, record_keys(session_id), identified)


def _scripts() -> Mapping[str, str]:
    lua = resources.files("orchestrator") / "lua"
    prelude = (lua / "_prelude.lua").read_text()
    of_sessions = {name: prelude + (lua / f"{name}.lua").read_text() for name in _SESSION_SCRIPTS}
    return of_sessions | {name: (lua / "shared" / f"{name}.lua").read_text() for name in _SHARED_SCRIPTS}
