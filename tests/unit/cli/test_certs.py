"""`specdec certs`: what it writes is what the roles take."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from specdec.cli.certs import role_options
from specdec.cli.main import app
from specdec.cli.roles import read_settings
from specdec.messages.cluster import Role
from specdec.wire.certificates import read_certificate
from specdec.wire.role_identity import role_certificates
from tests.unit.wire.test_roles_over_tls import open_session
from tests.unit.wire.tls_files import connected, serving


def certs(folder: Path, *options: str) -> str:
    shown = CliRunner().invoke(app, ["certs", str(folder), *options])
    assert shown.exit_code == 0, shown.output
    return shown.output


def settings_of(folder: Path, role: str):
    options = role_options(folder, role)
    named = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(options[::2], options[1::2], strict=True)
    }
    return read_settings(role, {"model": "m", **named} if role == "verifier" else named)


async def test_roles_with_what_it_wrote_know_one_another(tmp_path: Path) -> None:
    certs(tmp_path)
    verifier = role_certificates(settings_of(tmp_path, "verifier").tls, Role.VERIFIER)
    orchestrator = role_certificates(settings_of(tmp_path, "orchestrator").tls, Role.ORCHESTRATOR)
    async with (
        serving(Role.VERIFIER, verifier) as endpoint,
        connected(endpoint, Role.VERIFIER, orchestrator) as channel,
    ):
        await open_session(channel)


def test_the_orchestrator_has_the_names_by_which_clients_reach_it(tmp_path: Path) -> None:
    certs(tmp_path, "--host", "specdec.example.org", "--host", "192.0.2.7")
    leaf = x509.load_pem_x509_certificate((tmp_path / "orchestrator.crt").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) >= {"orchestrator.specdec", "localhost", "specdec.example.org"}
    assert "192.0.2.7" in {str(address) for address in names.get_values_for_type(x509.IPAddress)}


def test_keys_are_for_their_owner_alone_and_are_not_shown(tmp_path: Path) -> None:
    shown = certs(tmp_path)
    for name in ("ca", *(role.value.lower() for role in Role)):
        key = tmp_path / f"{name}.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert key.read_text().splitlines()[1] not in shown


def test_a_second_time_the_same_authority_signs_new_certificates(tmp_path: Path) -> None:
    certs(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    certs(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after["ca.crt"] == before["ca.crt"]
    assert after["verifier.crt"] != before["verifier.crt"]
    paths = settings_of(tmp_path, "verifier").tls
    assert paths is not None
    assert "verifier.specdec" in read_certificate(paths).dns_names


def test_files_that_are_no_authority_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("mine")
    (tmp_path / "ca.key").write_text("mine too")
    shown = CliRunner().invoke(app, ["certs", str(tmp_path)])
    assert shown.exit_code == 2
    assert (tmp_path / "ca.key").read_text() == "mine too"


@pytest.mark.parametrize(
    "host", ["two words", "https://specdec.example.org", "specdec.example.org:443", "-x", "bücher.example"]
)
def test_a_host_that_can_be_no_name_is_refused(tmp_path: Path, host: str) -> None:
    shown = CliRunner().invoke(app, ["certs", str(tmp_path), "--host", host])
    assert (shown.exit_code, "neither a DNS name nor an address" in shown.output) == (2, True)


def test_a_file_in_the_place_of_the_folder_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "pki").write_text("mine")
    shown = CliRunner().invoke(app, ["certs", str(tmp_path / "pki")])
    assert (shown.exit_code, "is no folder" in shown.output) == (2, True)


def test_tokens_that_are_not_there_are_told_before_anything_starts(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["up", "--auth-tokens", str(tmp_path / "tokens.json")])
    assert (shown.exit_code, "--auth-tokens: there is no file" in shown.output) == (2, True)


@pytest.mark.parametrize("missing", ["ca.crt", "drafter.key"])
def test_a_cluster_with_a_folder_that_lacks_a_file_is_told_so_before_anything_starts(
    tmp_path: Path, missing: str
) -> None:
    certs(tmp_path)
    (tmp_path / missing).unlink()
    shown = CliRunner().invoke(app, ["up", "--certs", str(tmp_path)])
    assert shown.exit_code == 2
    assert missing in shown.output
