"""Certificate files are replaced while roles run: both ends take the new ones, and nothing that runs breaks."""

import contextlib
import datetime
import os
import ssl
from pathlib import Path

import grpc.aio
import pytest
import structlog.testing
import trustme

from specdec.config import CertificatePaths, WireSettings
from specdec.errors import UnusableFileError
from specdec.last_good import LastGood
from specdec.messages.cluster import Role
from specdec.v1 import verifier_pb2, verifier_pb2_grpc
from specdec.wire.certificates import CertificateFiles, read_certificate
from specdec.wire.channel import RoleChannel
from specdec.wire.role_identity import dns_name, role_certificates
from tests.unit.wire.tls_files import DEADLINE_S, LONG_AGO, serving, write_identity


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def get_status(channel: grpc.aio.Channel) -> None:
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    await stub.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=DEADLINE_S)


async def echoed(call: "grpc.aio.StreamStreamCall", attachment_id: int) -> int:
    await call.write(verifier_pb2.VerifyRequest(attachment_id=attachment_id))
    answer = await call.read()
    assert isinstance(answer, verifier_pb2.VerifyResponse)
    return answer.attachment_id


async def test_both_ends_move_to_a_new_authority_while_a_stream_runs_on(tmp_path: Path, authority: trustme.CA) -> None:
    server_files = CertificateFiles(write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER)))
    caller_files = CertificateFiles(write_identity(tmp_path / "drafter", authority, dns_name(Role.DRAFTER)))
    async with serving(Role.VERIFIER, server_files) as endpoint:
        to_verifier = RoleChannel(endpoint, Role.VERIFIER, WireSettings(), caller_files)
        running = verifier_pb2_grpc.VerifierServiceStub(to_verifier.current()).Verify()
        assert await echoed(running, 1) == 1

        new_authority = trustme.CA()  # nobody trusts both: whoever still showed or expected the old one would fail
        write_identity(tmp_path / "verifier", new_authority, dns_name(Role.VERIFIER))
        write_identity(tmp_path / "drafter", new_authority, dns_name(Role.DRAFTER))
        await get_status(to_verifier.current())
        assert await echoed(running, 2) == 2
        await running.done_writing()
        assert await running.read() is grpc.aio.EOF
        await to_verifier.close()


async def test_a_channel_is_kept_while_the_files_are_the_same(tmp_path: Path, authority: trustme.CA) -> None:
    files = CertificateFiles(write_identity(tmp_path / "drafter", authority, dns_name(Role.DRAFTER)))
    channel = RoleChannel("127.0.0.1:1", Role.VERIFIER, WireSettings(), files)
    first = channel.current()
    assert channel.current() is first
    write_identity(tmp_path / "drafter", authority, dns_name(Role.DRAFTER))
    assert channel.current() is not first
    await channel.close()


def half_written_key(paths: CertificatePaths, authority: trustme.CA) -> None:
    paths.private_key.write_bytes(paths.private_key.read_bytes()[:40])


def certificate_before_its_key(paths: CertificatePaths, authority: trustme.CA) -> None:
    paths.certificate.write_bytes(authority.issue_cert(dns_name(Role.VERIFIER)).cert_chain_pems[0].bytes())


def no_key(paths: CertificatePaths, authority: trustme.CA) -> None:
    paths.private_key.unlink()


def an_expired_one(paths: CertificatePaths, authority: trustme.CA) -> None:
    write_identity(paths.certificate.parent, authority, dns_name(Role.VERIFIER), **LONG_AGO)


def garbage_authorities(paths: CertificatePaths, authority: trustme.CA) -> None:
    assert paths.authorities is not None
    paths.authorities.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA")


def a_curve_that_nobody_knows(paths: CertificatePaths, authority: trustme.CA) -> None:
    curve = bytes.fromhex("06082a8648ce3d030107")  # prime256v1
    der = ssl.PEM_cert_to_DER_cert(authority.issue_cert(dns_name(Role.VERIFIER)).cert_chain_pems[0].bytes().decode())
    assert curve in der
    paths.certificate.write_text(ssl.DER_cert_to_PEM_cert(der.replace(curve, curve[:-1] + b"\x06")))


SPOILERS = pytest.mark.parametrize(
    "spoil",
    [
        half_written_key,
        certificate_before_its_key,
        no_key,
        an_expired_one,
        garbage_authorities,
        a_curve_that_nobody_knows,
    ],
)


@SPOILERS
def test_files_that_make_no_sense_leave_the_last_good_ones_and_a_line_in_the_log(
    spoil, tmp_path: Path, authority: trustme.CA
) -> None:
    paths = write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    files = CertificateFiles(paths)
    good = files.current()
    key = paths.private_key.read_text()
    spoil(paths, authority)
    with structlog.testing.capture_logs() as lines:
        assert files.current() is good
        assert files.current() is good
    assert [line["event"] for line in lines] == ["files_not_usable_last_good_ones_stay"]
    assert key.splitlines()[1] not in repr(lines)
    write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    assert files.current() is not good


@SPOILERS
def test_at_the_start_they_are_refused_with_the_files_name(spoil, tmp_path: Path, authority: trustme.CA) -> None:
    paths = write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    spoil(paths, authority)
    with pytest.raises((UnusableFileError, FileNotFoundError), match=str(tmp_path)):
        read_certificate(paths)


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
def test_a_certificate_with_any_byte_changed_is_read_or_refused(tmp_path: Path, authority: trustme.CA) -> None:
    paths = write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    leaf = authority.issue_cert(dns_name(Role.VERIFIER))
    paths.private_key.write_bytes(leaf.private_key_pem.bytes())
    der = ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())
    for place, byte in enumerate(der):
        changed = bytes((*der[:place], byte ^ 1, *der[place + 1 :]))
        paths.certificate.write_text(ssl.DER_cert_to_PEM_cert(changed))
        with contextlib.suppress(UnusableFileError):
            read_certificate(paths)


def test_what_a_reader_did_not_foresee_leaves_the_last_good_content_too_and_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("good")

    def read() -> str:
        return {"good": "good"}[path.read_text()]

    files = LastGood([path], read, what="a file")
    path.write_text("secret")
    with structlog.testing.capture_logs() as lines:
        assert files.current() == "good"
    assert [line["fault"] for line in lines] == ["KeyError"]
    assert "secret" not in repr(lines)


def test_a_swap_of_a_link_as_kubernetes_does_it_is_seen(tmp_path: Path, authority: trustme.CA) -> None:
    for name in ("first", "second"):
        write_identity(tmp_path / name, authority, dns_name(Role.VERIFIER))
    mounted = tmp_path / "mounted"
    mounted.symlink_to(tmp_path / "first")
    files = CertificateFiles(CertificatePaths(mounted / "tls.crt", mounted / "tls.key", mounted / "ca.crt"))
    first = files.current()
    (tmp_path / "next").symlink_to(tmp_path / "second")
    os.replace(tmp_path / "next", mounted)
    assert files.current().chain_pem != first.chain_pem


def test_a_certificate_that_expires_in_use_is_told_in_the_log(tmp_path: Path, authority: trustme.CA) -> None:
    paths = write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    files = CertificateFiles(paths)
    object.__setattr__(files.current(), "expires_at", datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC))
    with structlog.testing.capture_logs() as lines:
        files.current()
        files.current()
    assert [(line["event"], line["log_level"]) for line in lines] == [("certificate_expired", "error")]


def test_a_role_does_not_start_with_the_certificate_of_another(tmp_path: Path, authority: trustme.CA) -> None:
    paths = write_identity(tmp_path / "drafter", authority, dns_name(Role.DRAFTER))
    with pytest.raises(UnusableFileError, match=r"verifier\.specdec"):
        role_certificates(paths, Role.VERIFIER)


def test_a_private_key_is_in_no_repr(tmp_path: Path, authority: trustme.CA) -> None:
    paths = write_identity(tmp_path / "verifier", authority, dns_name(Role.VERIFIER))
    assert paths.private_key.read_text().splitlines()[1] not in repr(read_certificate(paths))
