"""Sessions' records in Redis, or a server that speaks its protocol. The only room that imports redis.

Knows leases, epochs and rounds as numbers to compare; knows nothing of streams, verifiers or what a token means. Every
change is one Lua script, atomic and idempotent by request id, because the client library retries after a time-out.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Sequence
from enum import Enum
from importlib import resources
from types import TracebackType
from typing import Any, Self

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import NoScriptError, RedisError

from orchestrator.call_batches import CallBatches
from orchestrator.record import (
    Checkpoint,
    CommittedRound,
    SessionRecord,
    checkpoint_fields,
    decode_record,
    encode_tokens,
    record_keys,
)
from specdec.errors import StoreUnavailableError
from specdec.ids import Epoch, SessionId
from specdec.params import FinishReason

_NUM_RETRIES = 2
_BACKOFF_BASE_S = 0.02
_BACKOFF_CAP_S = 0.2
_READY_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 32
"""A burst of calls waits for one of these: the server runs one script at a time, more would only cost memory."""
_NUM_RECORD_KEYS = len(record_keys(SessionId("")))


class AcquireStatus(Enum):
    ACQUIRED = "ACQUIRED"
    HELD = "HELD"  # another owner's lease runs
    EXISTS = "EXISTS"  # it was to be new, and is not


class WriteStatus(Enum):
    OK = "OK"
    DUPLICATE = "DUPLICATE"  # the round is there with these tokens
    CONFLICT = "CONFLICT"  # the round is there with others
    FENCED = "FENCED"  # another owner holds the session
    GAP = "GAP"  # rounds before this one are missing
    LOST = "LOST"  # the store forgot what this owner wrote: it may restore


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
    lease_remaining_s: float


@dataclasses.dataclass(frozen=True)
class BumpReply:
    """`epoch` is the new one with OK, else the record's, 0 where there is none."""

    status: WriteStatus
    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    url: str
    lease_s: float = 10.0
    session_ttl_s: float = 600.0
    store_tokens: bool = True
    call_timeout_s: float = 1.0


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


class SessionStore:
    """Every method raises StoreUnavailableError where the server does not answer in time.

    A `request_id` names a call across retries: the same one is answered the same. Without it each call is a new one,
    and only the client library's own retries share an id.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=_MAX_CONNECTIONS,
            timeout=settings.call_timeout_s,
            socket_timeout=settings.call_timeout_s,
            socket_connect_timeout=settings.call_timeout_s,
            retry=Retry(ExponentialBackoff(cap=_BACKOFF_CAP_S, base=_BACKOFF_BASE_S), _NUM_RETRIES),
            health_check_interval=0,
        )
        self._redis = Redis.from_pool(pool)
        # However the library divides its retries, a call ends by then.
        self._deadline_s = 2 * settings.call_timeout_s
        self._calls: set[asyncio.Future[Any]] = set()
        lua = resources.files("orchestrator") / "lua"
        prelude = (lua / "_prelude.lua").read_text()
        self._scripts = {
            name: self._redis.register_script(prelude + (lua / f"{name}.lua").read_text())
            for name in ("acquire", "bump", "renew", "release", "commit", "restore", "cancel", "read")
        }
        self._commits: CallBatches[Sequence[str | bytes], Any] = CallBatches(self._send_commits)

    async def acquire(
        self,
        session_id: SessionId,
        owner_nonce: bytes,
        *,
        epoch_floor: int = 0,
        must_be_new: bool = False,
        request_id: str | None = None,
    ) -> AcquireReply:
        """Claims a session whose lease is free, expired or this nonce's own. epoch = max(record's, epoch_floor) + 1."""
        status, epoch, remaining_ms = await self._run(
            "acquire",
            session_id,
            [
                owner_nonce.hex(),
                str(epoch_floor),
                _milliseconds(self.settings.lease_s),
                _milliseconds(self.settings.session_ttl_s),
                "1" if must_be_new else "0",
            ],
            request_id,
        )
        return AcquireReply(AcquireStatus(status.decode()), Epoch(int(epoch)), int(remaining_ms) / 1000)

    async def bump(self, lease: Lease, *, epoch_floor: int = 0, request_id: str | None = None) -> BumpReply:
        """The same owner goes on under a new epoch, max(record's, epoch_floor) + 1, with its rounds counted from 0.

        Fences what still runs under the old one and renews the lease. OK, FENCED or LOST. After LOST a `restore` under
        a higher epoch does the same.
        """
        status, epoch, _ = await self._run(
            "bump",
            lease.session_id,
            [
                str(lease.epoch),
                lease.owner_nonce.hex(),
                str(epoch_floor),
                _milliseconds(self.settings.lease_s),
                _milliseconds(self.settings.session_ttl_s),
            ],
            request_id,
        )
        return BumpReply(WriteStatus(status.decode()), Epoch(int(epoch)))

    async def renew(self, lease: Lease, *, request_id: str | None = None) -> WriteStatus:
        """Prolongs the lease and the record's life. OK, FENCED or LOST."""
        arguments = [_milliseconds(self.settings.lease_s), _milliseconds(self.settings.session_ttl_s)]
        return await self._write("renew", lease, arguments, request_id)

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
        arguments: list[str | bytes] = [
            request_id or uuid.uuid4().hex,
            str(lease.epoch),
            lease.owner_nonce.hex(),
            str(last.verifier_cached_length),
            str(last.drafter_cached_length),
            last.drafter,
            _milliseconds(self.settings.session_ttl_s),
        ]
        for committed in rounds:
            arguments += (
                str(committed.round),
                str(committed.base_position),
                str(len(committed.token_ids)),
                encode_tokens(committed.token_ids) if self.settings.store_tokens else b"",
                committed.prefix_digest,
            )
        status, _, _ = await self._commits.call([*record_keys(lease.session_id), *arguments])
        return WriteStatus(status.decode())

    async def restore(self, checkpoint: Checkpoint, *, request_id: str | None = None) -> WriteStatus:
        """Writes the whole record: after Opened, and after LOST. OK, DUPLICATE (a later round is there) or FENCED."""
        arguments: list[str | bytes] = [
            str(checkpoint.round),
            str(len(checkpoint.token_ids)),
            _milliseconds(self.settings.lease_s),
            _milliseconds(self.settings.session_ttl_s),
            "1" if self.settings.store_tokens else "0",
            encode_tokens(checkpoint.token_ids) if self.settings.store_tokens else b"",
        ]
        for name, value in checkpoint_fields(checkpoint).items():
            arguments += [name, value]
        lease = Lease(checkpoint.session_id, checkpoint.epoch, checkpoint.owner_nonce)
        return await self._write("restore", lease, arguments, request_id)

    async def cancel(self, session_id: SessionId, tenant: str | None = None, *, request_id: str | None = None) -> bool:
        """Deletes a session and fences its owner. False where there was none, or none of this tenant; None: of any."""
        whose = ["0", ""] if tenant is None else ["1", tenant]
        arguments = [_milliseconds(self.settings.session_ttl_s), *whose]
        status, _, _ = await self._run("cancel", session_id, arguments, request_id)
        return WriteStatus(status.decode()) is WriteStatus.OK

    async def read(self, session_id: SessionId) -> SessionRecord | None:
        """The record as it is now, None where there is none."""
        fields, tokens = await self._run("read", session_id, [], None)
        if not fields:
            return None
        return decode_record(dict(zip(fields[::2], fields[1::2], strict=True)), tokens)

    async def is_reachable(self) -> bool:
        ping = asyncio.ensure_future(self._redis.ping())
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await asyncio.shield(ping)  # as every call: see _in_time
        except (RedisError, OSError, TimeoutError):
            return False
        finally:
            ping.cancel()
        return True

    async def close(self) -> None:
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _write(
        self, script: str, lease: Lease, arguments: Sequence[str | bytes], request_id: str | None
    ) -> WriteStatus:
        owner = [str(lease.epoch), lease.owner_nonce.hex()]
        status, _, _ = await self._run(script, lease.session_id, [*owner, *arguments], request_id)
        return WriteStatus(status.decode())

    async def _run(
        self, script: str, session_id: SessionId, arguments: Sequence[str | bytes], request_id: str | None
    ) -> Any:
        identified = [request_id or uuid.uuid4().hex, *arguments]
        return await self._in_time(script, self._scripts[script](keys=record_keys(session_id), args=identified))

    async def _send_commits(self, commits: Sequence[Sequence[str | bytes]]) -> Sequence[Any]:
        """One round trip for several commits, each with its keys and arguments; replies, and errors in their places."""
        replies = await self._in_time("commit", self._pipelined("commit", commits))
        return [
            StoreUnavailableError(f"the session store did not commit: {type(reply).__name__}")
            if isinstance(reply, Exception)
            else reply
            for reply in replies
        ]

    async def _pipelined(self, script: str, calls: Sequence[Sequence[str | bytes]]) -> Sequence[Any]:
        registered = self._scripts[script]
        replies = await self._evaluated(registered.sha, calls)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            await self._redis.script_load(registered.script)
            replies = await self._evaluated(registered.sha, calls)  # those that ran get the same answer again
        return replies

    async def _evaluated(self, sha: str, calls: Sequence[Sequence[str | bytes]]) -> Sequence[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for keys_and_arguments in calls:
                pipeline.execute_command("EVALSHA", sha, _NUM_RECORD_KEYS, *keys_and_arguments)
            return await pipeline.execute(raise_on_error=False)

    async def _in_time(self, script: str, running: Awaitable[Any]) -> Any:
        # A task of its own: redis-py waits with asyncio.wait_for, which on Python 3.11 may swallow a cancellation. It
        # cannot swallow ours. The server may still run a call that we gave up; every script takes that well.
        call = asyncio.ensure_future(running)
        self._calls.add(call)
        call.add_done_callback(self._on_call_done)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(call)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailableError(f"the session store did not {script}: {type(error).__name__}") from error
        finally:
            call.cancel()

    def _on_call_done(self, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # whoever gave the call up does not ask for it
