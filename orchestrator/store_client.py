"""Scripts run at the session store, within a deadline and with our own retries.

Knows scripts as texts, keys and arguments, and which failures pass by themselves: a broken connection, a failover,
slots that move. Knows nothing of sessions. A retry sends the very same arguments: a script that must not run twice
finds its request id among them. The client library's own retries are off: a call ends when its deadline says so.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import RedisCluster
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    SlotNotCoveredError,
    TimeoutError,
    TryAgainError,
)

from orchestrator.call_batches import CallBatches
from orchestrator.store_connection import connect, parse_store_url
from specdec.errors import StoreUnavailableError

Argument = str | bytes

_NUM_ATTEMPTS = 3
_BACKOFF_S = (0.02, 0.1)
_MAX_CONNECTIONS = 32
"""A burst of calls waits for one of these: the server runs one script at a time, more would only cost memory."""
_READY_TIMEOUT_S = 1.0
_PASSES = (
    AskError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    OSError,
    ReadOnlyError,
    RedisClusterException,
    SlotNotCoveredError,
    TimeoutError,
    TryAgainError,
)
"""What another attempt may not meet again."""


class ScriptCall(NamedTuple):
    """On a cluster all keys lie in one slot."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


class StoreClient:
    """`scripts` are the texts by name. A call's deadline is twice `call_timeout_s`, its retries included."""

    def __init__(self, url: str, scripts: Mapping[str, str], *, call_timeout_s: float) -> None:
        address = parse_store_url(url)
        self._redis = connect(address, connect_timeout_s=call_timeout_s, max_connections=2 * _MAX_CONNECTIONS)
        self._scripts = scripts
        self._shas = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in scripts.items()
        }
        self._attempt_s, self._deadline_s = call_timeout_s, 2 * call_timeout_s
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._batches: dict[tuple[str, str], CallBatches[ScriptCall, Any]] = {}

    async def evaluate(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """The script's answer. Calls of one script to one node that come while others are on their way go together.

        Raises:
            StoreUnavailableError: no answer within the deadline, or within two where another batch was under way.
        """
        batch = (script, self._node_of(keys[0]))
        if batch not in self._batches:
            self._batches[batch] = CallBatches(lambda calls: self.evaluate_each(script, calls))
        return await self._batches[batch].call(ScriptCall(keys, arguments))

    async def evaluate_each(self, script: str, calls: Sequence[ScriptCall]) -> Sequence[Any]:
        """Calls of one script in one round trip (to each node that they concern), each with its answer or its error.

        Raises:
            StoreUnavailableError: the deadline passed; some may have run.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._evaluate_each(script, calls)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise StoreUnavailableError(f"the session store did not {script}: {type(error).__name__}") from error

    async def is_reachable(self) -> bool:
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._redis.ping()
        except (RedisError, OSError):
            return False
        return True

    async def close(self) -> None:
        await self._redis.aclose()

    def _node_of(self, key: str) -> str:
        """Which server has the key, as far as is known: a slow node keeps no other's calls waiting."""
        if not isinstance(self._redis, RedisCluster):
            return ""
        try:
            node = self._redis.get_node_from_key(key)
        except SlotNotCoveredError:
            return ""
        return node.name if node is not None else ""

    async def _evaluate_each(self, script: str, calls: Sequence[ScriptCall]) -> Sequence[Any]:
        replies: dict[int, Any] = {}
        waiting = list(range(len(calls)))
        by_text = False
        for attempt in range(_NUM_ATTEMPTS + 1):  # one more for a server that has to be sent the text
            try:
                async with self._turns, asyncio.timeout(self._attempt_s):
                    answers = await self._attempt(script, [calls[index] for index in waiting], by_text=by_text)
            except _PASSES as error:
                answers = [error] * len(waiting)
            replies.update(zip(waiting, answers, strict=True))
            waiting = [index for index in waiting if isinstance(replies[index], (NoScriptError, *_PASSES))]
            if not waiting:
                break
            by_text = by_text or any(isinstance(replies[index], NoScriptError) for index in waiting)
            failures = [replies[index] for index in waiting if isinstance(replies[index], _PASSES)]
            if failures and attempt < _NUM_ATTEMPTS:
                await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                await self._look_again()
        return [
            StoreUnavailableError(f"the session store did not {script}: {type(reply).__name__}")
            if isinstance(reply := replies[index], Exception)
            else reply
            for index in range(len(calls))
        ]

    async def _attempt(self, script: str, calls: Sequence[ScriptCall], *, by_text: bool) -> Sequence[Any]:
        command = ("EVAL", self._scripts[script]) if by_text else ("EVALSHA", self._shas[script])
        pipeline = self._redis.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(*command, len(call.keys), *call.keys, *call.arguments)
        answers: Sequence[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def _look_again(self) -> None:
        """Before another attempt: who is the primary now?"""
        try:
            if isinstance(self._redis, RedisCluster):
                await self._redis.nodes_manager.initialize()
            else:  # those that are in use break when they fail, by themselves
                await self._redis.connection_pool.disconnect(inuse_connections=False)
        except (RedisError, OSError):
            pass  # the attempt will tell
