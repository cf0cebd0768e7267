"""Options come from the caller, then the environment, then the defaults; secrets show nowhere."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from specdec.config import (
    DrafterSettings,
    OrchestratorSettings,
    VerifierSettings,
    format_endpoint,
    is_loopback,
    parse_endpoint,
)


def test_the_caller_wins_over_the_environment_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VerifierSettings(model="m").max_sessions == 256
    monkeypatch.setenv("SPECDEC_VERIFIER_MAX_SESSIONS", "3")
    monkeypatch.setenv("SPECDEC_VERIFIER_WIRE__MAX_MESSAGE_BYTES", "4096")
    settings = VerifierSettings(model="m")
    assert (settings.max_sessions, settings.wire.max_message_bytes) == (3, 4096)
    assert VerifierSettings(model="m", max_sessions=5).max_sessions == 5


def test_each_role_reads_its_own_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_VERIFIER_THREADS", "7")
    assert DrafterSettings().threads is None


def test_endpoints_are_given_as_a_comma_separated_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ORCHESTRATOR_VERIFIERS", "10.0.0.1:50051, [::1]:50052")
    settings = OrchestratorSettings(drafters="localhost:1")
    assert settings.verifiers == ("10.0.0.1:50051", "[::1]:50052")
    assert settings.drafters == ("localhost:1",)


@pytest.mark.parametrize("endpoint", ["", "localhost", ":1", "h:", "h:x", "h:65536", "dns:///h:1", "h:-1", "h:²"])
def test_what_is_not_host_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        parse_endpoint(endpoint)
    with pytest.raises(ValidationError):
        OrchestratorSettings(verifiers=(endpoint,))


@pytest.mark.parametrize("endpoint", ["127.0.0.1:0", "[::1]:50051", "example.org:443"])
def test_an_endpoint_is_taken_apart_and_put_together_again(endpoint: str) -> None:
    assert format_endpoint(*parse_endpoint(endpoint)) == endpoint


def test_loopback_is_told_from_the_rest() -> None:
    assert all(is_loopback(endpoint) for endpoint in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"))
    assert not any(is_loopback(endpoint) for endpoint in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1"))


@pytest.mark.parametrize("topology", ["", "+sentinel", "+cluster"])
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_the_store_may_stand_behind_any_of_these(scheme: str, topology: str) -> None:
    url = f"{scheme}{topology}://store:6379"
    assert OrchestratorSettings(redis=url).redis.get_secret_value() == url


def test_a_password_in_the_redis_url_shows_in_no_text_form() -> None:
    settings = OrchestratorSettings(redis="rediss://user:hunter2@store:6379/0")
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert "hunter2" in settings.redis.get_secret_value()


@pytest.mark.parametrize(
    "options",
    [{"redis": "http://store"}, {"listen": "nowhere"}, {"unknown": 1}, {"session_ttl_s": 0}, {"durability": "maybe"}],
)
def test_a_value_without_sense_is_refused_at_start(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OrchestratorSettings(**options)


@pytest.mark.parametrize("given", [{"tls_cert"}, {"tls_cert", "tls_key"}, {"tls_ca"}, {"tls_key", "tls_ca"}])
def test_certificate_key_and_authorities_go_together(given: set[str]) -> None:
    with pytest.raises(ValidationError, match="go together"):
        DrafterSettings(proposer="ngram", **dict.fromkeys(given, "file.pem"))


def test_clients_see_the_edges_certificate_else_the_roles_and_need_none_of_their_own() -> None:
    role = {"tls_cert": "role.crt", "tls_key": "role.key", "tls_ca": "ca.crt"}
    edge = {"edge_tls_cert": "edge.crt", "edge_tls_key": "edge.key"}
    assert OrchestratorSettings().edge_tls is None
    assert OrchestratorSettings(**role).edge_tls == (Path("role.crt"), Path("role.key"), None)
    for settings in (OrchestratorSettings(**edge), OrchestratorSettings(**role, **edge)):
        assert settings.edge_tls == (Path("edge.crt"), Path("edge.key"), None)
    with pytest.raises(ValidationError, match="go together"):
        OrchestratorSettings(edge_tls_cert="edge.crt")


def test_a_key_set_is_of_no_use_without_an_issuer_and_an_audience() -> None:
    for given in ({}, {"auth_jwt_issuer": "i"}, {"auth_jwt_audience": "a"}):
        with pytest.raises(ValidationError, match="auth_jwks needs"):
            OrchestratorSettings(auth_jwks="jwks.json", **given)
