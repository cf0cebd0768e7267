import io
import json

import pytest
from rich.console import Console

from specdec.bench.load_display import describe_cell, load_table
from specdec.bench.load_figures import cell_figures, steady_tokens_per_s
from specdec.bench.load_report import LoadRecording, build_load_report
from tests.unit.bench.load import NGRAM, cell, output

COUNTED = {
    "verifier": {
        "specdec:verifier_step_seconds_sum": 2.0,
        "specdec:verifier_step_seconds_count": 20.0,
        "specdec:verifier_forward_seconds_sum": 1.6,
        "specdec:verifier_forward_seconds_count": 20.0,
    },
    "drafter-0": {"specdec:draft_budget_sum": 30.0, "specdec:draft_budget_count": 10.0},
    "drafter-1": {"specdec:draft_budget_sum": 10.0, "specdec:draft_budget_count": 10.0},
}


def recording(*cells: object) -> LoadRecording:
    return LoadRecording("abc", {"cpu": "one"}, {"target": "big"}, list(cells), complete=True)  # type: ignore[arg-type]


def test_rates_are_over_the_whole_cell_and_times_over_its_outputs() -> None:
    outputs = [output(0, range(10)), output(1, range(10), asked_s=0.5, first_s=2.5, token_s=0.05)]
    measured = cell_figures(cell(outputs), None)
    assert measured["tokens_per_s"] == 20 / 4
    assert measured["first_token_ms"]["p50"] == pytest.approx(1500)
    assert measured["first_token_ms"]["p99"] == pytest.approx(2000)
    assert measured["inter_token_ms"]["p50"] == pytest.approx(75)
    assert measured["rounds_per_s"] == 20 / 4
    assert measured["tokens_per_round"] == 1.0


def test_the_steady_rate_is_of_the_stretch_that_all_streams_share() -> None:
    slow_start = output(0, range(20), first_s=2.0, token_s=0.1)  # until 3.9
    early_end = output(1, range(21), first_s=1.0, token_s=0.1)  # until 3.0
    assert steady_tokens_per_s([slow_start, early_end]) == pytest.approx(20.0)


def test_streams_that_share_no_stretch_have_no_steady_rate() -> None:
    assert steady_tokens_per_s([output(0, range(3)), output(1, range(3), first_s=9.0)]) is None
    assert steady_tokens_per_s([]) is None


def test_the_arithmetic_is_tokens_over_the_forwards_own_time() -> None:
    measured = cell_figures(cell([output(0, range(8)), output(1, range(8))], counters=COUNTED), None)
    assert measured["arithmetic_tokens_per_s"] == 16 / 1.6
    assert measured["verifier"]["forward_ms"] == pytest.approx(80)
    assert measured["verifier"]["beside_forward_ms"] == pytest.approx(20)
    assert measured["verifier"]["steps_per_s"] == 5.0
    assert measured["draft_budget"] == 2.0


def test_the_prediction_takes_rows_and_tokens_of_a_round_as_they_were() -> None:
    outputs = [output(stream, range(8), num_draft_tokens=3) for stream in (0, 1)]
    asked: list[int] = []

    def forward_time(rows: int) -> float:
        asked.append(rows)
        return 0.05

    assert cell_figures(cell(outputs, lane=NGRAM), forward_time)["predicted_tokens_per_s"] == 2 * 1 / 0.05
    assert asked == [2 * (1 + 3)]


def test_outputs_that_differ_from_the_targets_own_are_counted() -> None:
    alone = cell([output(0, [1, 2, 3]), output(1, [4, 5, 6])])
    drafted = cell([output(0, [1, 2, 3]), output(1, [4, 5, 7])], lane=NGRAM)
    report = build_load_report(recording(alone, drafted), None)
    assert report["num_mismatching_outputs"] == 1
    assert [run["num_mismatching_outputs"] for run in report["runs"]] == [0, 1]


def test_repetitions_become_medians_and_are_compared_within_themselves() -> None:
    cells = []
    for repetition, (alone_s, drafted_s) in enumerate([(4.0, 2.0), (8.0, 2.0), (6.0, 6.0)]):
        cells.append(cell([output(0, range(9), first_s=1, token_s=alone_s)], repetition=repetition, elapsed_s=alone_s))
        drafted = [output(0, range(9), first_s=1, token_s=drafted_s)]
        cells.append(cell(drafted, lane=NGRAM, repetition=repetition, elapsed_s=drafted_s))
    report = build_load_report(recording(*cells), None)
    assert [run["label"] for run in report["runs"]] == ["target_only", "ngram"]
    assert report["runs"][0]["tokens_per_s"] == 9 / 6
    assert report["runs"][1]["over_target_only"] == 2.0
    assert len(report["cells"]) == 6


def test_the_report_is_plain_json_and_names_what_failed() -> None:
    failed = cell([], errors=["OVERLOADED: too many sessions wait"])
    report = build_load_report(recording(failed), None)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["num_errors"] == 1
    assert report["errors"] == ["OVERLOADED: too many sessions wait"]
    assert "1 failed: OVERLOADED" in describe_cell(failed)


def test_the_table_has_a_row_for_each_number_of_streams_and_way() -> None:
    alone, drafted = cell([output(0, range(9))], counters=COUNTED), cell([output(0, range(9))], lane=NGRAM)
    out = io.StringIO()
    Console(file=out, width=272).print(load_table(build_load_report(recording(alone, drafted), None)["runs"]))
    rows = [line.split("│")[1:4] for line in out.getvalue().splitlines() if "│" in line]
    assert [[part.strip() for part in row] for row in rows] == [["2", "target_only", "0"], ["2", "ngram", "0"]]


def test_the_table_tells_how_many_rounds_had_a_draft() -> None:
    outputs = [output(0, range(9)), output(1, range(9), num_draft_tokens=3)]
    out = io.StringIO()
    Console(file=out, width=300).print(
        load_table(build_load_report(recording(cell(outputs, lane=NGRAM)), None)["runs"])
    )
    lines = out.getvalue().splitlines()
    headings = [part.strip() for part in next(line for line in lines if "drafted" in line).split("┃")[1:-1]]
    row = [part.strip() for part in next(line for line in lines if "ngram" in line).split("│")[1:-1]]
    assert row[headings.index("drafted")] == "0.50"
