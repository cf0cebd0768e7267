"""The index of leases: which sessions to look at when, so that those that nobody owns any more are found.

A hint and no more: sorted sets beside the sessions' records, written after them and never waited for. What is true
stands in the record. Sixteen shards, since one script on a cluster may not touch two slots. All times are the store's.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.call_batches import CallBatches
from orchestrator.store_client import ScriptCall, StoreClient
from specdec.errors import StoreUnavailableError
from specdec.ids import SessionId

NUM_SHARDS = 16
_MAX_NOTES = 65_536
"""Sessions whose entries are on their way; more are left to their records' time to live."""


class DueSession(NamedTuple):
    """`score` is the entry as it was put off: `settle` changes no other."""

    session_id: SessionId
    score: str


class LeaseIndex:
    def __init__(self, client: StoreClient, *, ttl_s: float) -> None:
        self._client = client
        self._ttl_ms = str(round(ttl_s * 1000))
        self._batches: CallBatches[tuple[SessionId, float], str] = CallBatches(self._add)
        self._notes: set[asyncio.Task[None]] = set()

    def note(self, session_id: SessionId, lease_s: float) -> None:
        """The session's lease may be over in so many seconds. Returns at once; what cannot be written is forgotten."""
        if len(self._notes) < _MAX_NOTES:
            noting = asyncio.create_task(self._note(session_id, lease_s))
            self._notes.add(noting)
            noting.add_done_callback(self._notes.discard)

    async def due(self, shard: int, *, limit: int, put_off_s: float) -> Sequence[DueSession]:
        """Up to `limit` sessions whose time has come. No other replica gets them for `put_off_s`.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        arguments = [self._ttl_ms, str(limit), str(round(put_off_s * 1000))]
        flat = await self._client.evaluate("index_due", [_key(shard)], arguments)
        texts = [part.decode() for part in flat]
        return [DueSession(SessionId(name), score) for name, score in zip(texts[::2], texts[1::2], strict=True)]

    async def settle(self, shard: int, looked_at: Sequence[tuple[DueSession, float | None]]) -> None:
        """Each with the seconds until it is to be looked at again, None for never. Raises StoreUnavailableError."""
        arguments: list[str] = []
        for due, again_s in looked_at:
            arguments += (*due, "" if again_s is None else str(round(again_s * 1000)))
        await self._client.evaluate("index_settle", [_key(shard)], arguments)

    async def close(self) -> None:
        """Waits for nothing: entries on their way are a hint."""
        for noting in tuple(self._notes):
            noting.cancel()
        await asyncio.gather(*self._notes, return_exceptions=True)

    async def _note(self, session_id: SessionId, lease_s: float) -> None:
        with contextlib.suppress(StoreUnavailableError):
            await self._batches.call((session_id, lease_s))

    async def _add(self, notes: Sequence[tuple[SessionId, float]]) -> Sequence[str | Exception]:
        by_shard: dict[int, list[str]] = {}
        for session_id, lease_s in notes:
            by_shard.setdefault(_shard(session_id), [self._ttl_ms]).extend((session_id, str(round(lease_s * 1000))))
        calls = [ScriptCall([_key(shard)], arguments) for shard, arguments in by_shard.items()]
        await self._client.evaluate_each("index_add", calls)
        return [""] * len(notes)


def _shard(session_id: SessionId) -> int:
    return zlib.crc32(session_id.encode()) % NUM_SHARDS


def _key(shard: int) -> str:
    return f"specdec:leases:{{{shard:02d}}}"
