"""Who can see and do what: sealed records, records without tokens, a user that may do no more than it must, TLS."""

import asyncio
import contextlib
import dataclasses
import secrets
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import trustme
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from orchestrator.embedded_store import EmbeddedStore
from orchestrator.reaper import Reaper
from orchestrator.record import encode_tokens
from orchestrator.session_store import AcquireStatus, Lease, ReapStatus, SessionStore, StoreSettings, WriteStatus
from specdec.errors import RecordUnreadableError, ResumeMismatchError, StoreUnavailableError, UnknownSessionError
from specdec.ids import SessionId, digest_tokens
from tests.system.fakes import FakeVerifier, expected_output, served_verifier, tokenise
from tests.system.orchestrator_harness import (
    Client,
    error_of,
    long_spec,
    nothing_running,
    orchestrator,
    read_until_tokens,
    routed,
)
from tests.system.store_fixtures import PROMPT, acquired, make_checkpoint, make_round, new_nonce, opened
from tests.system.store_servers import StoreCluster, StoreServer, WatchedPrimary, running

pytestmark = pytest.mark.system

S = SessionId("s")
OUTPUT = (1_234_567, 7_654_321, 1_111_111)
DOCUMENTED_ACL = Path(__file__).parents[2] / "docs" / "redis.md"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore() as embedded:
        yield embedded


def key_file(folder: Path, *keys: bytes) -> Path:
    path = folder / f"keys-{secrets.token_hex(4)}"
    path.write_text("".join(f"{key.hex()}\n" for key in keys))
    return path


async def every_value(url: str) -> bytes:
    """All that Redis holds, keys included."""
    async with Redis.from_url(url) as raw:
        keys = await raw.keys("*")
        return b"".join(keys) + b"".join([await raw.dump(key) for key in keys])


async def write_a_session(store: SessionStore) -> None:
    lease = await opened(store)
    prefix: tuple[int, ...] = PROMPT
    for number, token in enumerate(OUTPUT, start=1):
        assert await store.commit(lease, make_round(number, prefix, [token])) is WriteStatus.OK
        prefix = (*prefix, token)


def borders_told(data: bytes) -> list[bool]:
    """Whether the digest after each number of output tokens can be found."""
    return [digest_tokens((*PROMPT, *OUTPUT[:n]))[:12] in data for n in range(len(OUTPUT) + 1)]


async def test_a_sealed_record_shows_no_token_no_text_and_no_digest_and_reads_back(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    async with Redis.from_url(server.url) as raw:
        await raw.config_set("rdbcompression", "no")
    settings = StoreSettings(server.url, token_key_file=key_file(tmp_path, secrets.token_bytes(32)))
    async with SessionStore(settings) as store:
        await write_a_session(store)
        seen = await every_value(server.url)
        assert not any(encode_tokens([token]) in seen for token in OUTPUT)
        assert b"temperature" not in seen
        assert not any(borders_told(seen))
        record = await store.read(S)
        assert record is not None
        assert record.request is not None
        assert (record.token_ids, record.request.sampling.seed) == ((*PROMPT, *OUTPUT), 11)
    async with SessionStore(StoreSettings(server.url)) as plain:  # what a record that is not sealed shows
        await plain.cancel(S)
        await write_a_session(plain)
        seen = await every_value(server.url)
        assert all(encode_tokens([token]) in seen for token in OUTPUT)
        assert all(borders_told(seen))


async def test_rounds_of_a_sealed_record_are_told_apart_as_those_of_a_plain_one(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    settings = StoreSettings(server.url, token_key_file=key_file(tmp_path, secrets.token_bytes(32)))
    async with SessionStore(settings) as store:
        lease = await opened(store)
        one, two = make_round(1, PROMPT, [8, 9]), make_round(2, [*PROMPT, 8, 9], [10])
        assert await store.commit(lease, one, two) is WriteStatus.OK
        assert await store.commit(lease, one) is WriteStatus.DUPLICATE
        assert await store.commit(lease, make_round(1, PROMPT, [8, 7])) is WriteStatus.CONFLICT
        assert await store.commit(lease, make_round(4, [*PROMPT, 8, 9, 10], [1])) is WriteStatus.GAP
        assert await store.restore(make_checkpoint(lease, [*PROMPT, 8, 9, 10], round_number=2)) is WriteStatus.OK
        assert await store.commit(lease, two) is WriteStatus.DUPLICATE
        assert await store.commit(lease, make_round(2, [*PROMPT, 8, 9], [11])) is WriteStatus.CONFLICT
        assert await store.commit(lease, make_round(3, [*PROMPT, 8, 9, 10], [11])) is WriteStatus.OK
        async with Redis.from_url(server.url) as raw:
            await raw.delete("specdec:{s}:tokens")  # evicted by itself
        assert await store.commit(lease, make_round(4, [*PROMPT, 8, 9, 10, 11], [12])) is WriteStatus.LOST


async def test_a_record_whose_key_is_missing_wrong_or_whose_parts_were_swapped_is_refused_and_can_be_cancelled(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    key = secrets.token_bytes(32)
    async with SessionStore(StoreSettings(server.url, token_key_file=key_file(tmp_path, key))) as store:
        await opened(store)
        await opened(store, "other")
        async with Redis.from_url(server.url) as raw:
            await raw.set("specdec:{other}:tokens", await raw.get("specdec:{s}:tokens"))
        with pytest.raises(RecordUnreadableError, match="moved"):
            await store.read(SessionId("other"))
    for keys in (None, key_file(tmp_path, secrets.token_bytes(32))):
        async with SessionStore(StoreSettings(server.url, token_key_file=keys)) as store:
            with pytest.raises(RecordUnreadableError, match="key"):
                await store.read(S)
    rotated = key_file(tmp_path, secrets.token_bytes(32), key)
    async with SessionStore(StoreSettings(server.url, token_key_file=rotated)) as store:
        record = await store.read(S)
        assert record is not None
        assert record.token_ids == PROMPT
        assert await store.cancel(S)


@pytest.mark.parametrize("sealed", [False, True])
async def test_without_tokens_redis_holds_positions_and_digests_that_tell_a_clients_tokens(
    server: EmbeddedStore, tmp_path: Path, sealed: bool
) -> None:
    keys = key_file(tmp_path, secrets.token_bytes(32)) if sealed else None
    async with SessionStore(StoreSettings(server.url, store_tokens=False, token_key_file=keys)) as store:
        await write_a_session(store)
        seen = await every_value(server.url)
        assert not any(encode_tokens([token]) in seen for token in OUTPUT)
        assert encode_tokens(PROMPT) not in seen
        record = await store.read(S)
        assert record is not None
        assert record.token_ids is None
        whole = (*PROMPT, *OUTPUT)
        for length in range(len(PROMPT), len(whole) + 1):  # behind the record by any number of rounds
            assert record.agrees_with(whole[:length])
            for position in range(length):
                assert not record.agrees_with(changed(whole[:length], position))
        assert record.agrees_with((*whole, 5))  # ahead of it
        assert not record.agrees_with((*changed(whole, 4), 5))


async def test_ends_of_rounds_outlive_a_change_of_the_verifier(server: EmbeddedStore) -> None:
    async with SessionStore(StoreSettings(server.url, store_tokens=False)) as store:
        await write_a_session(store)
        record = await store.read(S)
        assert record is not None
        whole = (*PROMPT, *OUTPUT)
        lease = Lease(S, record.epoch, record.owner_nonce)
        epoch = (await store.bump(lease)).epoch
        lease = Lease(S, epoch, record.owner_nonce)
        assert await store.restore(make_checkpoint(lease, whole)) is WriteStatus.OK
        assert await store.commit(lease, make_round(1, whole, [5])) is WriteStatus.OK
        record = await store.read(S)
        assert record is not None
        for length in range(len(PROMPT), len(whole) + 1):
            assert record.agrees_with(whole[:length])
            assert not record.agrees_with(changed(whole[:length], 1))


async def left_early(client: Client, session_id: str) -> list[int]:
    """What a client has of an output whose stream it left."""
    call = client.call(long_spec(40), session_id)
    answer = await read_until_tokens(call, 12)
    call.cancel()
    await nothing_running(client)
    return answer.token_ids


async def test_tokens_of_another_output_are_refused_at_resume_where_the_record_keeps_none(
    server: EmbeddedStore,
) -> None:
    async with (
        served_verifier(FakeVerifier(round_s=0.02)) as target,
        orchestrator([target], redis=server.url, store_tokens=False) as client,
    ):
        await routed(client)
        received = await left_early(client, "s")
        spec = dataclasses.replace(long_spec(40), prompt=tokenise("hello"))
        for wrong in (changed(received, 0), changed(received[:4], 2)):
            assert isinstance(await error_of(client.resume("s", wrong, spec)), ResumeMismatchError)
        answer = await client.resume("s", received[:6], spec)
        assert answer.token_ids == expected_output(tokenise("hello"), 40)


async def test_a_session_that_was_sealed_is_resumed_where_the_key_is_and_refused_with_a_reason_where_it_is_not(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, secrets.token_bytes(32))
    async with (
        served_verifier(FakeVerifier(round_s=0.02)) as target,
        orchestrator([target], redis=server.url, token_key_file=keys) as sealing,
        orchestrator([target], redis=server.url) as without,
    ):
        await routed(sealing)
        await routed(without)
        received = await left_early(sealing, "s")
        assert isinstance(await error_of(without.resume("s", received)), RecordUnreadableError)
        others, nobodys = [await error_of(without.resume(name, [], tenant="another")) for name in ("s", "none")]
        assert isinstance(others, UnknownSessionError)
        assert (type(others), others.message, others.metadata) == (type(nobodys), nobodys.message, nobodys.metadata)
        assert (await without.generate(long_spec(4), "t")).token_ids == expected_output(tokenise("hello"), 4)
        assert (await sealing.resume("s", received)).token_ids == expected_output(tokenise("hello"), 40)


def changed(token_ids: Sequence[int], position: int) -> tuple[int, ...]:
    return (*token_ids[:position], token_ids[position] + 1, *token_ids[position + 1 :])


def acl_line() -> str:
    """The documented line, its password replaced."""
    lines = [line for line in DOCUMENTED_ACL.read_text().splitlines() if line.startswith("user specdec ")]
    assert len(lines) == 1
    return lines[0].replace(">PASSWORD", ">pw")


async def use_everything(store: SessionStore) -> None:
    lease = await opened(store)
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.OK
    assert await store.commit(lease, make_round(1, PROMPT, [8])) is WriteStatus.DUPLICATE
    assert await store.renew(lease) is WriteStatus.OK
    assert (await store.acquire(S, new_nonce(), must_be_new=True)).status is AcquireStatus.EXISTS
    assert (await store.bump(lease)).status is WriteStatus.OK
    assert await store.read(S) is not None
    await store.release(await opened(store, "t"))
    assert await store.cancel(SessionId("t"))
    await acquired(store, "u")
    await store.release(await opened(store, "abandoned"))
    assert (await store.reap(SessionId("abandoned"))).status is ReapStatus.ABANDONED
    await store.set_drained("127.0.0.1:1", drained=True)
    await store.set_drained("127.0.0.1:2", drained=False)
    assert await store.read_drained() == {"127.0.0.1:1"}
    assert await store.is_reachable()
    index = store.lease_index
    store.lease_index.note(SessionId("v"), 0.0)
    found = []
    async with asyncio.timeout(10):
        while not found:
            found = [(shard, due) for shard in range(16) for due in await index.due(shard, limit=9, put_off_s=0.0)]
    for shard, due in found:
        await index.settle(shard, [(due, 0.0)])
    await Reaper(store).turn()


FORBIDDEN = (
    ("GET", "other"), ("SET", "specdecoy", "1"), ("EVAL", "return redis.call('GET', 'other')", "0"),
    ("EVAL", "return 1", "1", "other"), ("DUMP", "specdec:x"), ("SUBSCRIBE", "specdec:x"),
    ("KEYS", "*"), ("SCAN", "0"), ("MONITOR",), ("CLIENT", "LIST"), ("ACL", "LIST"), ("CONFIG", "GET", "*"),
    ("FLUSHALL",), ("SHUTDOWN",), ("SCRIPT", "FLUSH"), ("FUNCTION", "LIST"),
    ("REPLICAOF", "NO", "ONE"), ("CLUSTER", "RESET"),
)  # fmt: skip


async def test_the_documented_user_can_do_all_that_is_needed_and_nothing_else(tmp_path: Path) -> None:
    async with running(StoreServer(tmp_path / "one", acl_line())) as server:
        url = server.url.replace("redis://", "redis://specdec:pw@")
        async with SessionStore(StoreSettings(url)) as store:
            await use_everything(store)
        async with Redis.from_url(url) as user:
            for command in FORBIDDEN:
                with pytest.raises(ResponseError, match=r"permission|ACL"):
                    await user.execute_command(*command)


async def test_the_documented_user_can_do_it_on_a_cluster_too(tmp_path: Path) -> None:
    async with running(StoreCluster(tmp_path)) as cluster:
        for node in cluster.nodes:
            async with node.client() as client:
                await client.execute_command("ACL", "SETUSER", *acl_line().split()[1:])
        async with SessionStore(StoreSettings(cluster.url.replace("://", "://specdec:pw@"))) as store:
            await use_everything(store)


async def test_a_user_that_may_not_do_what_is_needed_is_reported_as_such(tmp_path: Path) -> None:
    line = "user specdec on >pw ~specdec:* +ping"
    async with running(StoreServer(tmp_path / "one", line)) as server:
        url = server.url.replace("redis://", "redis://specdec:pw@")
        async with SessionStore(StoreSettings(url)) as store:
            with pytest.raises(StoreUnavailableError, match="NoPermission"):
                await store.acquire(S, new_nonce())


class TlsFront:
    """Ends TLS before servers that have none: `ports` maps each of its own ports to the one behind it."""

    def __init__(self, folder: Path, *, client_certificates: bool = True) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        client = authority.issue_cert("specdec-client")
        self.certificate, self.key = folder / "client.pem", folder / "client.key"
        client.cert_chain_pems[0].write_to_path(str(self.certificate))
        client.private_key_pem.write_to_path(str(self.key))
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1", "localhost").configure_cert(self._context)
        if client_certificates:
            authority.configure_trust(self._context)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._servers: list[asyncio.Server] = []

    async def before(self, port: int) -> int:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pump(reader, behind_writer), _pump(behind_reader, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=self._context)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def options(self, *, certificate: bool = True) -> str:
        own = f"&ssl_certfile={self.certificate}&ssl_keyfile={self.key}" if certificate else ""
        return f"?ssl_ca_certs={self.ca}{own}"

    def close(self) -> None:
        for server in self._servers:
            server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_store_behind_tls_is_used_with_the_certificates_that_the_url_names(tmp_path: Path) -> None:
    async with running(StoreServer(tmp_path / "one", acl_line())) as server:
        front = TlsFront(tmp_path)
        port = await front.before(server.port)
        base = f"rediss://specdec:pw@127.0.0.1:{port}/0"
        async with SessionStore(StoreSettings(base + front.options())) as store:
            await use_everything(store)
        stranger = tmp_path / "stranger.pem"
        trustme.CA().cert_pem.write_to_path(str(stranger))
        for options in (
            front.options(certificate=False),  # who are you?
            front.options().replace(str(front.ca), str(stranger)),  # and who are you?
        ):
            async with SessionStore(StoreSettings(base + options, call_timeout_s=0.5)) as store:
                assert not await store.is_reachable()
                with pytest.raises(StoreUnavailableError):
                    await store.acquire(SessionId("w"), new_nonce())
        front.close()


async def test_a_primary_behind_sentinels_is_used_over_tls(tmp_path: Path) -> None:
    primary = StoreServer(tmp_path / "primary")
    async with running(primary):
        front = TlsFront(tmp_path)
        tls_port = await front.before(primary.port)
        sentinel = StoreServer(
            tmp_path / "sentinel",
            f"sentinel monitor sessions 127.0.0.1 {primary.port} 1",
            sentinel=True,
        )
        async with running(sentinel):
            sentinel_port = await front.before(sentinel.port)
            async with sentinel.client() as client:  # what clients are told is where TLS is
                await client.execute_command("SENTINEL", "REMOVE", "sessions")
                await client.execute_command("SENTINEL", "MONITOR", "sessions", "127.0.0.1", tls_port, 1)
                await client.execute_command("SENTINEL", "SET", "sessions", "down-after-milliseconds", 600_000)
            url = f"rediss+sentinel://127.0.0.1:{sentinel_port}/{WatchedPrimary.SERVICE}{front.options()}"
            async with SessionStore(StoreSettings(url)) as store:
                await use_everything(store)
        front.close()
