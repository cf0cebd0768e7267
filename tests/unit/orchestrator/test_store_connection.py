"""What a URL of the session store says."""

import pytest
from redis.asyncio import Connection, SSLConnection

from orchestrator.store_connection import parse_store_url
from specdec.errors import InvalidParameterError


def test_one_server_is_named_by_host_port_and_database() -> None:
    address = parse_store_url("redis://user:p%40ss@store:6380/2")
    assert (address.topology, address.nodes) == ("", (("store", 6380),))
    assert address.options == {"username": "user", "password": "p@ss", "db": 2, "connection_class": Connection}
    assert parse_store_url("redis://[::1]").nodes == (("::1", 6379),)


def test_a_cluster_is_named_by_some_of_its_nodes() -> None:
    address = parse_store_url("redis+cluster://user:pw@a:1,b:2,[::1]:3")
    assert (address.topology, address.nodes) == ("cluster", (("a", 1), ("b", 2), ("::1", 3)))
    assert address.options["username"] == "user"


def test_sentinels_are_named_with_the_service_that_they_watch() -> None:
    address = parse_store_url("redis+sentinel://:pw@a,b:2/sessions/3?sentinel_password=other")
    assert (address.topology, address.service) == ("sentinel", "sessions")
    assert address.nodes == (("a", 26379), ("b", 2))
    assert (address.options["password"], address.options["sentinel_password"], address.options["db"]) == (
        "pw",
        "other",
        3,
    )


@pytest.mark.parametrize("topology", ["", "+cluster", "+sentinel"])
def test_rediss_is_tls_whatever_stands_behind(topology: str) -> None:
    service = "/sessions" if topology == "+sentinel" else ""
    address = parse_store_url(f"rediss{topology}://a{service}?ssl_ca_certs=/ca.pem&ssl_check_hostname=false")
    assert address.options["connection_class"] is SSLConnection
    assert address.options["ssl_ca_certs"] == "/ca.pem"
    assert address.options["ssl_check_hostname"] is False


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@a",
        "redis+other://user:secret@a",
        "redis://user:secret@",
        "redis://user:secret@a:port",
        "redis://user:secret@a,b",
        "redis://:secret/rest@a",
        "redis+sentinel://user:secret@a",
        "redis+cluster://user:secret@a/1",
        "redis://user:secret@a?socket_read_size=secret",
        "",
    ],
)
def test_what_is_no_url_of_a_store_is_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"store|hosts|service|cluster") as caught:
        parse_store_url(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_password_is_in_no_repr() -> None:
    assert "secret" not in repr(parse_store_url("redis://user:secret@a"))
