"""Logs are JSON with a role and without content; metrics carry vLLM's names and are served until closed."""

import json
import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from specdec.messages import RoundStatistics
from specdec.params import NextTokenKind
from specdec.telemetry import DrafterMetrics, MetricsExporter, OrchestratorMetrics, VerifierMetrics, configure_logging


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.usefixtures("restored_logging")
def test_both_kinds_of_loggers_write_json_lines_with_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("verifier", "info")
    structlog.get_logger("specdec.test").info("listening", endpoint="127.0.0.1:1")
    logging.getLogger("library").warning("slow by %d ms", 3, extra={"endpoint": "127.0.0.1:2"})
    logging.getLogger("library").debug("not at this level")
    first, second = logged(capsys)
    assert (
        first.items() >= {"event": "listening", "endpoint": "127.0.0.1:1", "role": "verifier", "level": "info"}.items()
    )
    assert second.items() >= {"event": "slow by 3 ms", "endpoint": "127.0.0.1:2", "role": "verifier"}.items()


@pytest.mark.usefixtures("restored_logging")
def test_content_that_somebody_passes_to_the_log_is_withheld(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("verifier", "info")
    structlog.get_logger("specdec.test").info("request", prompt="a secret", token_ids=[1, 2])
    logging.getLogger("library").info("request", extra={"text": "a secret"})
    assert "a secret" not in json.dumps(logged(capsys))


@pytest.mark.usefixtures("restored_logging")
def test_a_failure_is_logged_with_its_traceback_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("verifier", "info")
    try:
        raise KeyError("missing")
    except KeyError as error:
        structlog.get_logger("specdec.test").error("failed", exc_info=error)
    (line,) = logged(capsys)
    assert "Traceback" in line["exception"]


def test_a_round_is_counted_under_vllm_s_names() -> None:
    metrics = VerifierMetrics()
    statistics = RoundStatistics(
        num_draft_tokens=4,
        num_accepted_tokens=2,
        next_token_kind=NextTokenKind.RECOVERED,
        total_time_s=0.2,
        verify_forward_time_s=0.15,
        queue_time_s=0.001,
        draft_time_s=0.03,
        round_trip_time_s=0.0005,
    )
    metrics.record_round(statistics, num_committed_tokens=3)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"specdec:{name}", labels)

    assert value("spec_decode_num_drafts_total") == 1
    assert value("spec_decode_num_draft_tokens_total") == 4
    assert value("spec_decode_num_accepted_tokens_total") == 2
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="0") == 1
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="2") is None
    assert value("generation_tokens_total") == 3
    assert value("round_trip_seconds_count") == 1


def test_a_plain_decode_step_is_no_draft() -> None:
    metrics = VerifierMetrics()
    metrics.record_round(RoundStatistics(0, 0, NextTokenKind.PLAIN, 0.1, 0.1, 0.0, fallback_decode=True), 1)
    assert metrics.registry.get_sample_value("specdec:spec_decode_num_drafts_total") == 0
    assert metrics.registry.get_sample_value("specdec:fallback_decodes_total") == 1
    assert metrics.registry.get_sample_value("specdec:round_trip_seconds_count") == 0


@pytest.mark.parametrize("metrics_class", [VerifierMetrics, DrafterMetrics, OrchestratorMetrics])
def test_two_servers_in_one_process_count_apart(metrics_class: Any) -> None:
    first, second = metrics_class(), metrics_class()
    first.num_requests_running.inc()
    assert second.registry.get_sample_value("specdec:num_requests_running") == 0


@pytest.mark.system
def test_metrics_are_served_until_closed() -> None:
    with MetricsExporter(OrchestratorMetrics(), "127.0.0.1:0") as exporter:
        url = f"http://{exporter.endpoint}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert "specdec:time_to_first_token_seconds_bucket" in answer.read().decode()
    exporter.close()  # once more does no harm
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_metrics_are_not_shown_to_other_machines_unasked() -> None:
    with pytest.raises(ValueError, match="insecure_bind"):
        MetricsExporter(OrchestratorMetrics(), "0.0.0.0:0")
