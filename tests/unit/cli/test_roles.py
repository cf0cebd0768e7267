import inspect
import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from specdec import config
from specdec.cli import roles
from specdec.cli.failures import UsageError
from specdec.cli.main import app

FROM_THE_ENVIRONMENT_ALONE = {"wire"}


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (roles.verifier, config.VerifierSettings),
        (roles.drafter, config.DrafterSettings),
        (roles.orchestrator, config.OrchestratorSettings),
    ],
)
def test_every_setting_of_a_role_is_an_option_of_its_command(
    command: Callable[..., None], settings: type[config.RoleSettings]
) -> None:
    assert set(inspect.signature(command).parameters) == set(settings.model_fields) - FROM_THE_ENVIRONMENT_ALONE


def test_an_option_wins_over_the_environment_which_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_VERIFIER_MAX_SESSIONS", "3")
    monkeypatch.setenv("SPECDEC_VERIFIER_MAX_DRAFT_TOKENS", "4")
    settings = roles.read_settings("verifier", {"model": "m", "max_sessions": 5, "max_draft_tokens": None})
    assert (settings.max_sessions, settings.max_draft_tokens) == (5, 4)


def test_what_a_setting_does_not_take_is_told_by_the_options_name() -> None:
    with pytest.raises(UsageError, match=r"--max-sessions: .*greater"):
        roles.read_settings("verifier", {"model": "m", "max_sessions": 0})


def test_what_a_list_does_not_take_is_told_as_a_person_would() -> None:
    with pytest.raises(UsageError, match=r"^--verifiers: not host:port: 'here'$"):
        roles.read_settings("orchestrator", {"verifiers": "127.0.0.1:1,here"})


def test_a_verifier_without_a_model_is_told_so() -> None:
    with pytest.raises(UsageError, match="--model: Field required"):
        roles.read_settings("verifier", {})


def test_other_machines_are_let_in_only_when_asked() -> None:
    roles.require_loopback("--listen", "127.0.0.1:1", insecure_bind=False)
    roles.require_loopback("--listen", "0.0.0.0:1", insecure_bind=True)
    with pytest.raises(UsageError, match="insecure-bind"):
        roles.require_loopback("--listen", "0.0.0.0:1", insecure_bind=False)


@pytest.mark.parametrize(
    ("role", "told"),
    [
        ("verifier", ["256", "2000.0", "prefix-caching", "loopback-only"]),
        ("drafter", ["draft_model", "int8", "64"]),
        ("orchestrator", ["embedded", "relaxed", "store-tokens"]),
    ],
)
def test_the_help_of_a_role_tells_the_defaults_of_its_settings(role: str, told: list[str]) -> None:
    result = CliRunner().invoke(app, [role, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    defaults = set(re.findall(r"\[default: ([^\]]*)\]", result.output))
    assert set(told) <= defaults
    assert not any("Undefined" in default or "None" in default for default in defaults)


@pytest.mark.parametrize("role", ["verifier", "drafter", "orchestrator"])
def test_with_certificates_grpc_may_be_reached_from_other_machines_and_metrics_may_not(role: str) -> None:
    command = [role, *(["--model", "m"] if role == "verifier" else [])]
    tls = ["--tls-cert", "no.crt", "--tls-key", "no.key", "--tls-ca", "no.crt"]
    for options, why in (
        (["--listen", "192.0.2.1:0"], "--listen: 192.0.2.1:0 can be reached"),
        ([*tls, "--metrics", "192.0.2.1:0"], "--metrics: 192.0.2.1:0 can be reached"),
        ([*tls, "--listen", "192.0.2.1:0"], "no.crt"),  # as far as the files, which are not there
    ):
        shown = CliRunner().invoke(app, [*command, *options])
        assert shown.exit_code != 0
        assert why in shown.output


def test_options_that_go_together_are_told_without_a_name_that_none_has() -> None:
    with pytest.raises(UsageError, match=r"^tls_cert, tls_key and tls_ca go together"):
        roles.read_settings("drafter", {"tls_cert": "x"})
