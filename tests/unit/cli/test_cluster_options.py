from typing import Any

import pytest

from specdec.cli.cluster_options import (
    ClusterOptions,
    drafter_arguments,
    orchestrator_arguments,
    orchestrator_environment,
    verifier_arguments,
)
from specdec.cli.roles import read_settings

ENDPOINTS = {"verifier": "127.0.0.1:1", "drafter-1": "127.0.0.1:3", "drafter-0": "127.0.0.1:2"}


def as_settings(role: str, arguments: list[str]) -> Any:
    names = [name.removeprefix("--").replace("-", "_") for name in arguments[::2]]
    return read_settings(role, dict(zip(names, arguments[1::2], strict=True)))


@pytest.mark.parametrize("proposer", ["ngram", "draft_model", "stacked"])
def test_every_argument_is_a_setting_of_its_role(proposer: str) -> None:
    options = ClusterOptions(
        proposer=proposer,
        draft_model=None if proposer == "ngram" else "small",
        quantization=None if proposer == "ngram" else "int4",
        device="cpu",
        dtype="float32",
        num_threads=2,
        num_draft_threads=1,
    )
    as_settings("verifier", verifier_arguments(options))
    as_settings("drafter", drafter_arguments(options))
    as_settings("orchestrator", orchestrator_arguments(options, ENDPOINTS))


def test_the_orchestrator_is_told_every_drafter_in_order() -> None:
    arguments = orchestrator_arguments(ClusterOptions(), ENDPOINTS)
    assert arguments[arguments.index("--drafters") + 1] == "127.0.0.1:2,127.0.0.1:3"


def test_a_redis_password_is_on_no_command_line() -> None:
    options = ClusterOptions(redis="redis://:secret@localhost:6379")
    assert not any("secret" in argument for argument in orchestrator_arguments(options, ENDPOINTS))
    assert orchestrator_environment(options) == {"SPECDEC_ORCHESTRATOR_REDIS": options.redis}


@pytest.mark.parametrize(
    "options",
    [
        ClusterOptions(proposer="oracle"),
        ClusterOptions(proposer="draft_model"),
        ClusterOptions(proposer="ngram", draft_model="small"),
        ClusterOptions(proposer="none", quantization="int8"),
        ClusterOptions(num_drafters=0),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: ClusterOptions) -> None:
    with pytest.raises(ValueError, match=r"proposer|drafter"):
        options.validated()


def test_the_environment_says_where_the_roles_metrics_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("VERIFIER", "DRAFTER", "ORCHESTRATOR"):
        monkeypatch.setenv(f"SPECDEC_{role}_METRICS", "127.0.0.1:9771")
    for role, arguments in [
        ("verifier", verifier_arguments(ClusterOptions())),
        ("drafter", drafter_arguments(ClusterOptions())),
        ("orchestrator", orchestrator_arguments(ClusterOptions(), ENDPOINTS)),
    ]:
        assert as_settings(role, arguments).metrics == "127.0.0.1:9771"
