from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.table import Table

from specdec.bench import display, report
from specdec.cli import bench


def test_the_table_of_a_benchmark_keeps_its_headings_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headings = [f"a heading {number}" for number in range(10)]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report, "build_report", lambda recording: {"runs": [{}]})
    monkeypatch.setattr(display, "results_table", lambda runs: Table(*headings))
    bench._finish(cast(Any, SimpleNamespace(prompts=())), None)
    shown = capsys.readouterr().out
    assert all(heading in shown for heading in headings)
