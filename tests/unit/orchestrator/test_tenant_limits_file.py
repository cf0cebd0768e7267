"""The file with tenants whose limits differ from the settings."""

import os
from pathlib import Path

import pytest

from orchestrator.tenant_limits import TenantLimits
from orchestrator.tenant_limits_file import TenantLimitsSource
from specdec.errors import UnusableFileError

DEFAULTS = TenantLimits(requests_per_s=2.0, max_streams=8)
TOML = """
[tenants.team-a]
requests_per_s = 5
request_burst = 10

[tenants.batch]
requests_per_s = "unlimited"
tokens_per_s = 1000.5

[tenants.""]
max_streams = 1
"""
JSON = """{"tenants": {"team-a": {"requests_per_s": 5, "request_burst": 10},
    "batch": {"requests_per_s": "unlimited", "tokens_per_s": 1000.5}, "": {"max_streams": 1}}}"""


@pytest.mark.parametrize(("name", "text"), [("limits.toml", TOML), ("limits.json", JSON)])
def test_a_file_changes_what_it_names_and_leaves_the_rest_as_it_is(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    limits_of = TenantLimitsSource(DEFAULTS, tmp_path / name).limits_of
    assert limits_of("team-a") == TenantLimits(requests_per_s=5.0, request_burst=10, max_streams=8)
    assert limits_of("batch") == TenantLimits(tokens_per_s=1000.5, max_streams=8)
    assert limits_of("") == TenantLimits(requests_per_s=2.0, max_streams=1)
    assert limits_of("somebody") == DEFAULTS


def test_without_a_file_the_settings_hold_for_everybody() -> None:
    assert TenantLimitsSource(DEFAULTS, None).limits_of("team-a") == DEFAULTS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants.a]\nrequests_per_s = -1", "tenants.a.requests_per_s: .*greater than 0"),
        ("[tenants.a]\nmax_streams = 1.5", "tenants.a.max_streams: .*integer"),
        ("[tenants.a]\nmax_streams = true", "tenants.a.max_streams"),
        ("[tenants.a]\nrequests_per_s = nan", "tenants.a.requests_per_s: .*finite"),
        ("[tenants.a]\nrequest_per_s = 1", "tenants.a.request_per_s: .*not permitted"),
        ("[tenants.'a b']", "'a b' is no tenant"),
        ("[tenant.a]", "tenants: .*required"),
        ("tenants = 3", "tenants: "),
        ("[tenants", "limits.toml: "),
    ],
)
def test_a_file_that_does_not_make_sense_is_refused_by_what_is_wrong_in_it(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(UnusableFileError, match=told):
        TenantLimitsSource(DEFAULTS, path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("tenants: {}")
    with pytest.raises(UnusableFileError, match=r"\.toml or \.json"):
        TenantLimitsSource(DEFAULTS, path)
    with pytest.raises(FileNotFoundError):
        TenantLimitsSource(DEFAULTS, tmp_path / "none.toml")


def test_a_file_is_read_again_when_it_changes_and_the_last_good_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[tenants.a]\nmax_streams = 1")
    limits_of = TenantLimitsSource(DEFAULTS, path).limits_of
    assert limits_of("a").max_streams == 1
    _replace(path, "[tenants.a]\nmax_streams = 22")
    assert limits_of("a").max_streams == 22
    _replace(path, "[tenants.a]\nmax_streams = -3.5")
    assert limits_of("a").max_streams == 22
    _replace(path, "[tenants.b]\nmax_streams = 7")
    assert (limits_of("a").max_streams, limits_of("b").max_streams) == (8, 7)


def _replace(path: Path, text: str) -> None:
    """As an editor does: another file takes the name."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)
