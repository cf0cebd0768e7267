"""A connection to the session store from its URL, whatever the servers behind it.

    redis://user:password@host:port/db              one server, or one address in front of several
    redis+sentinel://host:port,host:port/service    a primary that Sentinels watch; they are asked for it
    redis+cluster://host:port,host:port             Redis Cluster; any of its nodes tell the others

`rediss`, `rediss+sentinel` and `rediss+cluster` speak TLS. Options follow a `?`: `ssl_ca_certs`, `ssl_certfile`,
`ssl_keyfile` (paths of PEM files), `ssl_check_hostname`, and `sentinel_username`, `sentinel_password` for Sentinels.
Knows addresses and options, no command. The client library retries nothing by itself: see store_client.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from specdec.errors import InvalidParameterError

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379
_RESP_VERSION = 2  # one round trip less at each connection, and nothing of what version 3 adds is used


@dataclasses.dataclass(frozen=True)
class StoreAddress:
    """A URL taken apart. `options` are the client library's; they hold the password."""

    topology: str
    nodes: tuple[tuple[str, int], ...]
    service: str
    options: Mapping[str, Any] = dataclasses.field(repr=False)


def parse_store_url(url: str) -> StoreAddress:
    """Raises InvalidParameterError, which does not tell the password, for a URL that is none of these."""
    scheme, _, rest = url.partition("://")
    tls, _, topology = scheme.partition("+")
    if tls not in ("redis", "rediss") or topology not in ("", "sentinel", "cluster"):
        raise InvalidParameterError("the store's URL has an unknown scheme", field="redis")
    authority, slash, tail = rest.partition("/")
    if not slash:
        authority, mark, query = authority.partition("?")
        tail = mark + query
    user, at, hosts = authority.rpartition("@")
    default_port = _DEFAULT_SENTINEL_PORT if topology == "sentinel" else _DEFAULT_PORT
    nodes = tuple(_host_and_port(host, default_port) for host in hosts.split(","))
    if topology == "" and len(nodes) != 1:
        raise InvalidParameterError("several hosts need redis+sentinel:// or redis+cluster://", field="redis")
    service, _, query = tail.partition("?")
    if topology == "sentinel":
        service, _, database = service.partition("/")
        if not service:
            raise InvalidParameterError("redis+sentinel:// needs the service's name as its path", field="redis")
        tail = f"{database}?{query}"
    try:
        options: dict[str, Any] = dict(parse_url(f"{tls}://{user}{at}{hosts.split(',')[0]}/{tail}"))
    except ValueError:
        raise InvalidParameterError("an option in the store's URL has a value that is none", field="redis") from None
    if topology == "cluster" and options.pop("db", 0) != 0:
        raise InvalidParameterError("the store's URL names a database, and a cluster has none but 0", field="redis")
    options.pop("host", None)
    options.pop("port", None)
    options.setdefault("connection_class", Connection)
    return StoreAddress(topology, nodes, service if topology == "sentinel" else "", options)


def connect(address: StoreAddress, *, connect_timeout_s: float, max_connections: int) -> "Redis | RedisCluster":
    """A client that connects at its first call. It waits for answers as long as its caller does."""
    limits: dict[str, Any] = {
        "socket_timeout": None,  # with one, the library makes a task for each write, which costs more than the write
        "socket_connect_timeout": connect_timeout_s,
        "max_connections": max_connections,
        "protocol": _RESP_VERSION,
        "health_check_interval": 0,
    }
    options = {**address.options, **limits}
    if address.topology == "cluster":
        is_tls = options.pop("connection_class") is SSLConnection
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
            ssl=is_tls,
            retry=_no_retry(),
            require_full_coverage=False,  # a node that is down takes its own sessions with it and no others
            reinitialize_steps=0,  # a slot that moved moves: nobody's connections are closed for it
            **options,
        )
    options["retry"] = _no_retry()
    if address.topology == "sentinel":
        return _primary_by_sentinel(address, options, limits)
    host, port = address.nodes[0]
    return Redis.from_pool(ConnectionPool(host=host, port=port, **options))


def _primary_by_sentinel(address: StoreAddress, options: dict[str, Any], limits: dict[str, Any]) -> Redis:
    is_tls = options.pop("connection_class") is SSLConnection
    credentials = {
        "username": options.pop("sentinel_username", None),
        "password": options.pop("sentinel_password", None),
    }
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")} | {"ssl": is_tls}
    # Half of an attempt: a Sentinel that hangs leaves time for the next one.
    patience_s = limits["socket_connect_timeout"] / 2
    timeouts = {"socket_timeout": patience_s, "socket_connect_timeout": patience_s}
    of_sentinels = {**limits, **timeouts, "retry": _no_retry(), **credentials, **tls}
    sentinel = Sentinel(address.nodes, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    primary: Redis = sentinel.master_for(address.service, **options, ssl=is_tls)
    return primary


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:  # its text may hold a part of a password that was not quoted
        raise InvalidParameterError("a host or port in the store's URL is none", field="redis") from None
    if not host:
        raise InvalidParameterError("the store's URL names no host", field="redis")
    return host, port or default_port
