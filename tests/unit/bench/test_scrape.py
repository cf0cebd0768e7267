from specdec.bench.scrape import difference, mean, read_metrics, scrape
from specdec.telemetry import MetricsExporter, VerifierMetrics


def test_what_a_server_counts_is_read_over_http_labels_summed() -> None:
    metrics = VerifierMetrics()
    metrics.stale_drafts.labels("late").inc(2)
    metrics.stale_drafts.labels("conflict").inc()
    metrics.verify_seconds.observe(0.25)
    with MetricsExporter(metrics, "127.0.0.1:0") as exporter:
        counted = scrape(exporter.endpoint)
    assert counted["specdec:stale_drafts_total"] == 3
    assert mean(counted, "specdec:verify_seconds") == 0.25


def test_only_what_was_counted_between_two_looks_counts() -> None:
    before = read_metrics('# TYPE s histogram\ns_bucket{le="+Inf"} 2\ns_count 2\ns_sum 6\n')
    after = read_metrics('# TYPE s histogram\ns_bucket{le="+Inf"} 4\ns_count 4\ns_sum 16\n')
    assert mean(difference(before, after), "s") == 5
    assert mean(difference(after, after), "s") is None
    assert mean({}, "s") is None
