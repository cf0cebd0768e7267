import io

from rich.console import Console

from specdec.bench.display import BenchView, results_table
from specdec.bench.report import build_report
from tests.unit.bench.synthetic import plain, prompt_record, recording, speculative, verify_round


def test_off_a_terminal_each_prompt_is_one_line() -> None:
    out = io.StringIO()
    record = prompt_record("a", "qa", plain([1, 2]), {"ngram": speculative([1, 3], [])})
    with BenchView(1, 2, Console(file=out, width=40)) as view:
        view.step(record.prompt, "target_only")
        view.step(record.prompt, "ngram")
        view.prompt(record)
    assert out.getvalue() == "1/1 qa a: target_only 0.20, ngram 0.40 DIFFERS tokens/s\n"


def test_on_a_terminal_a_bar_counts_generations() -> None:
    out = io.StringIO()
    record = prompt_record("a", "qa", plain([1, 2]), {"ngram": speculative([1, 2], [])})
    with BenchView(1, 2, Console(file=out, width=100, force_terminal=True)) as view:
        view.step(record.prompt, "target_only")
        view.step(record.prompt, "ngram")
        view.prompt(record)
    assert "2/2" in out.getvalue()


def test_the_table_has_a_row_for_each_run() -> None:
    ours = speculative([1, 2], [verify_round(1, 1), verify_round(1, 1)])
    report = build_report(recording(prompt_record("a", "qa", plain([1, 2]), {"ngram": ours})))
    out = io.StringIO()
    Console(file=out, width=140).print(results_table(report["runs"]))
    row = next(line for line in out.getvalue().splitlines() if "ngram" in line)
    assert [cell.strip() for cell in row.split("│")[1:6]] == ["ngram", "qa", "1", "0", "0.20"]
