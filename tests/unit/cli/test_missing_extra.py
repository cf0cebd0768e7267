"""Where a role's extra is not installed, one line says which, also when it is noticed only once the role runs."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from specdec.cli import roles
from specdec.cli.main import app


async def _serve_without_torch(settings: object) -> None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.parametrize("options", [["verifier", "--model", "m"], ["drafter", "--proposer", "ngram"]])
def test_a_package_that_is_missed_while_the_role_runs_is_named_with_its_extra(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "role_module", lambda role: SimpleNamespace(serve=_serve_without_torch))
    result = CliRunner().invoke(app, options)
    assert result.exit_code != 0
    assert f"torch is not installed: pip install 'specdec[{options[0]}]'" in result.output
