"""A Redis of one's own: the commands that our scripts use, the scripts themselves run by Lua, and faults that it has.

Knows bytes, expiry by its own wall clock, and how to forget its last writes. What a call finds and leaves is told to
`on_script`, so that invariants may be checked at every write.
"""

import copy
import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import lupa.lua51
from redis.exceptions import NoScriptError, ResponseError

from tests.simulation.virtual_time import WALL_CLOCK_BEGIN_S, VirtualLoop

_LUA = lupa.lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
_compiled: dict[bytes, tuple[str, Any]] = {}
"""Scripts by SHA-1: their names and their functions."""


class SortedSet(dict[bytes, float]):
    """Members with scores."""

    def ranked(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """What one script did to one session's record: the fields of its hash, empty where there is none."""

    name: str
    session_id: str
    arguments: Sequence[bytes]
    before: dict[bytes, bytes]
    after: dict[bytes, bytes]
    tokens_before: bytes
    tokens_after: bytes
    reply: Any


class RedisServer:
    """All data is in `data`; values are bytes, dicts, lists and SortedSets, as Redis has them."""

    def __init__(self, loop: VirtualLoop, on_script: Callable[[ScriptRun], None]) -> None:
        self._loop = loop
        self._on_script = on_script
        self.data: dict[bytes, Any] = {}
        self.expires_at_ms: dict[bytes, int] = {}
        self.clock_offset_s = 0.0
        self.history = 0
        """Rises whenever writes are forgotten."""
        self._known_scripts: set[bytes] = set()
        self._saved: tuple[dict[bytes, Any], dict[bytes, int]] = ({}, {})

    # --- Faults ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """From here on writes are lost by `roll_back`."""
        self._saved = copy.deepcopy((self.data, self.expires_at_ms))

    def roll_back(self) -> None:
        """As after kill -9 and a restart without the tail of the log. Scripts have to be sent anew."""
        self.data, self.expires_at_ms = copy.deepcopy(self._saved)
        self._known_scripts.clear()
        self.history += 1

    def flush(self) -> None:
        """As after a restart without any log."""
        self._saved = ({}, {})
        self.roll_back()

    # --- Commands from outside ---------------------------------------------------------------------------------------

    def execute(self, *command: Any) -> Any:
        """The reply, or the exception that a client would raise."""
        name, *arguments = [part if isinstance(part, bytes) else str(part).encode() for part in command]
        try:
            if name in (b"EVALSHA", b"EVAL"):
                return self._evaluate(name == b"EVAL", *arguments)
            if name == b"SCRIPT":
                return self._load(arguments[1])
            return self.call(name, *arguments)
        except NoScriptError as error:  # what else goes wrong is a mistake of the scripts, or of ours
            return error

    def live_keys(self) -> list[bytes]:
        for key in list(self.data):
            self._expire(key)
        return list(self.data)

    def _load(self, text: bytes) -> bytes:
        sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
        if sha not in _compiled:
            _compiled[sha] = (_script_name(text), _LUA.compile(b"local KEYS, ARGV, redis, struct = ...\n" + text))
        self._known_scripts.add(sha)
        return sha

    def _evaluate(self, is_text: bool, script: bytes, num_keys: bytes, *rest: bytes) -> Any:
        sha = self._load(script) if is_text else script
        if sha not in self._known_scripts:
            raise NoScriptError("NOSCRIPT No matching script")
        name, function = _compiled[sha]
        keys, arguments = rest[: int(num_keys)], rest[int(num_keys) :]
        record_key = next((key for key in keys if key.endswith(b":record")), b"")
        tokens_key = record_key.removesuffix(b"record") + b"tokens"
        before, tokens_before = dict(self.data.get(record_key, {})), self.data.get(tokens_key, b"")
        _caller.append(self)
        try:
            reply = _from_lua(function(_LUA.table_from(keys), _LUA.table_from(arguments), _REDIS, _STRUCT))
        finally:
            _caller.pop()
        if record_key:
            session_id = record_key.partition(b"{")[2].partition(b"}")[0].decode()
            after, tokens_after = dict(self.data.get(record_key, {})), self.data.get(tokens_key, b"")
            run = ScriptRun(name, session_id, arguments, before, after, tokens_before, tokens_after, reply)
            self._on_script(run)
        return reply

    # --- Commands ----------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return round((WALL_CLOCK_BEGIN_S + self._loop.now + self.clock_offset_s) * 1000)

    def _expire(self, key: bytes) -> None:
        if key in self.expires_at_ms and self.expires_at_ms[key] <= self._now_ms():
            self.data.pop(key, None)
            del self.expires_at_ms[key]

    def call(self, name: bytes, *arguments: bytes) -> Any:
        command = getattr(self, f"_do_{name.decode().lower()}", None)
        if command is None:
            raise ResponseError(f"the simulated Redis has no {name.decode()}")
        if name not in (b"TIME", b"PING"):
            self._expire(arguments[0])
        return command(*arguments)

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        return self.data.get(key, {})

    def _do_ping(self) -> bytes:
        return b"PONG"

    def _do_time(self) -> list[bytes]:
        seconds, milliseconds = divmod(self._now_ms(), 1000)
        return [str(seconds).encode(), str(milliseconds * 1000).encode()]

    def _do_del(self, *keys: bytes) -> int:
        for key in keys:
            self.expires_at_ms.pop(key, None)
        return sum(self.data.pop(key, None) is not None for key in keys)

    def _do_exists(self, *keys: bytes) -> int:
        return sum(key in self.data for key in keys)

    def _do_pexpire(self, key: bytes, milliseconds: bytes) -> int:
        if key not in self.data:
            return 0
        self.expires_at_ms[key] = self._now_ms() + int(milliseconds)
        return 1

    def _do_pttl(self, key: bytes) -> int:
        if key not in self.data:
            return -2
        return self.expires_at_ms[key] - self._now_ms() if key in self.expires_at_ms else -1

    def _do_set(self, key: bytes, value: bytes) -> bytes:
        self.data[key] = value
        self.expires_at_ms.pop(key, None)
        return b"OK"

    def _do_get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def _do_append(self, key: bytes, value: bytes) -> int:
        self.data[key] = self.data.get(key, b"") + value
        return len(self.data[key])

    def _do_strlen(self, key: bytes) -> int:
        return len(self.data.get(key, b""))

    def _do_getrange(self, key: bytes, start: bytes, end: bytes) -> bytes:
        value = self.data.get(key, b"")
        first, last = (int(float(place)) for place in (start, end))
        first = max(0, first + len(value) if first < 0 else first)
        last = last + len(value) if last < 0 else last
        return value[first : last + 1] if last >= first else b""

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        values = self.data.setdefault(key, {})
        added = len(set(pairs[::2]) - values.keys())
        values.update(zip(pairs[::2], pairs[1::2], strict=True))
        return added

    def _do_hget(self, key: bytes, field: bytes) -> bytes | None:
        return self._hash(key).get(field)

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        return [self._hash(key).get(field) for field in fields]

    def _do_hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in self._hash(key).items() for part in pair]

    def _do_hkeys(self, key: bytes) -> list[bytes]:
        return list(self._hash(key))

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        values = self._hash(key)
        num_removed = sum(values.pop(field, None) is not None for field in fields)
        if key in self.data and not values:
            self._do_del(key)
        return num_removed

    def _do_lpush(self, key: bytes, *values: bytes) -> int:
        items = self.data.setdefault(key, [])
        for value in values:
            items.insert(0, value)
        return len(items)

    def _do_lrange(self, key: bytes, start: bytes, end: bytes) -> list[bytes]:
        items: list[bytes] = self.data.get(key, [])
        last = int(end)
        return items[int(start) : None if last == -1 else last + 1]

    def _do_ltrim(self, key: bytes, start: bytes, end: bytes) -> bytes:
        if key in self.data:
            self.data[key] = self._do_lrange(key, start, end)
        return b"OK"

    def _do_zadd(self, key: bytes, *pairs: bytes) -> int:
        members = self.data.setdefault(key, SortedSet())
        added = len(set(pairs[1::2]) - members.keys())
        members.update({member: float(score) for score, member in zip(pairs[::2], pairs[1::2], strict=True)})
        return added

    def _do_zrem(self, key: bytes, *members: bytes) -> int:
        scores = self.data.get(key, SortedSet())
        num_removed = sum(scores.pop(member, None) is not None for member in members)
        if key in self.data and not scores:
            self._do_del(key)
        return num_removed

    def _do_zcard(self, key: bytes) -> int:
        return len(self.data.get(key, ()))

    def _do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self.data.get(key, {}).get(member)
        return None if score is None else f"{score:.17g}".encode()

    def _do_zrange(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        """Of scores from low to high, the first so many: `BYSCORE LIMIT 0 count` is what our scripts ask for."""
        if options[:3] != (b"BYSCORE", b"LIMIT", b"0"):
            raise ResponseError("the simulated Redis ranges by score alone")
        members: SortedSet = self.data.get(key, SortedSet())
        found = [one for one in members.ranked() if float(low) <= members[one] <= float(high)]
        return found[: int(options[3])]


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return f"{value:.17g}".encode()


def _pack(layout: bytes, *values: float) -> bytes:
    return struct.pack(layout.replace(b"i4", b"i").decode(), *(int(value) for value in values))


def _unpack(layout: bytes, data: bytes, position: float = 1) -> tuple[Any, ...]:
    """The values, and the position behind them, counted from 1."""
    native = layout.replace(b"i4", b"i").decode()
    start = int(position) - 1
    return (*struct.unpack_from(native, data, start), start + struct.calcsize(native) + 1)


def _to_lua(value: Any) -> Any:
    if value is None:
        return False
    if isinstance(value, list):
        return _LUA.table_from([_to_lua(one) for one in value])
    return value


def _from_lua(value: Any) -> Any:
    if lupa.lua51.lua_type(value) == "table":
        return [_from_lua(value[place]) for place in range(1, len(value) + 1)]
    if isinstance(value, bool):
        return 1 if value else None
    return int(value) if isinstance(value, float) else value


def _call_from_lua(name: bytes, *arguments: Any) -> Any:
    return _to_lua(_caller[-1].call(name.upper(), *(_argument(one) for one in arguments)))


_caller: list[RedisServer] = []
"""Whose script runs. Lua is given the same few functions for good: what comes and goes, it mixes up."""
_REDIS = _LUA.table_from({b"call": _call_from_lua})
_STRUCT = _LUA.table_from({b"pack": _pack, b"unpack": _unpack})


def _script_name(text: bytes) -> str:
    lua = resources.files("orchestrator") / "lua"
    for path in (*lua.iterdir(), *(lua / "shared").iterdir()):
        if path.name.endswith(".lua") and not path.name.startswith("_") and text.endswith(path.read_bytes()):
            return path.name.removesuffix(".lua")
    raise ResponseError("not a script of ours")
