"""What a campaign tells a person at its end."""

from specdec.bench.faults.report import build_campaign_report, summary_lines


def test_the_summary_of_a_campaign_is_for_people() -> None:
    report = build_campaign_report([], [], [], 0.0)
    nothing = "0 faults, 0 outputs, 0 tokens, 0 failovers; streams that ended at clients: none"
    assert summary_lines(report) == [nothing]  # without a fault no promise was tried
    assert summary_lines(report | {"num_faults": 3})[-1] == "every promise was kept"
    broken = summary_lines(
        report
        | {
            "stream_ends_by_reason": {"UNKNOWN_SESSION": 1, "PEER_UNAVAILABLE": 3},
            "recovery": {"num_pauses": 5, "median_s": 0.306, "p99_s": 0.6, "max_s": 0.61},
            "promises": [{"name": "tokens lost", "num_broken": 2, "examples": []}],
        }
    )
    assert broken[0].endswith("streams that ended at clients: 3 PEER_UNAVAILABLE, 1 UNKNOWN_SESSION")
    assert broken[1:] == [
        "next token after a fault: median 0.31 s, p99 0.60 s, at most 0.61 s, of 5",
        "promises broken: 2 times",
    ]
