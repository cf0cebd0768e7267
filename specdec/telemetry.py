"""Logs and metrics of a role. Logs are JSON lines on stderr; metrics are served for Prometheus.

Knows names and formats, no role's logic. Names are vLLM's where vLLM has one, with our prefix. Neither logs nor metrics
ever hold a prompt, a text or a token id.
"""

import logging
import sys
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from specdec.config import format_endpoint, is_loopback, parse_endpoint
from specdec.messages import RoundStatistics

PREFIX = "specdec:"
WITHHELD_KEYS = frozenset(
    {
        *("prompt", "text", "messages", "token_ids", "output", "content"),
        *("attach_key", "attach_secret", "authorization", "token", "private_key", "password"),
    }
)
"""Log fields that are replaced before a line is written, should anybody ever pass one."""
_SHUTDOWN_TIMEOUT_S = 5.0
_ROUND_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_DRAFT_BUDGET_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 512)
_STEP_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0)


# --- Logs ------------------------------------------------------------------------------------------------------------


def configure_logging(role: str, level: str = "info") -> None:
    """JSON lines on stderr with `role` in each, from structlog and from the standard library's loggers alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _adder_of(role),
        _withhold,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _adder_of(role: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["role"] = role
        return event

    return add


def _withhold(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in WITHHELD_KEYS & event.keys():
        event[key] = "[withheld]"
    return event


# --- Metrics ---------------------------------------------------------------------------------------------------------


class Metrics:
    """A registry of its own, so that two roles in one process, or two tests, never share a number."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(PREFIX + name, documentation, registry=self.registry)

    def histogram(self, name: str, documentation: str, buckets: tuple[float, ...] = _ROUND_BUCKETS_S) -> Histogram:
        return Histogram(PREFIX + name, documentation, buckets=buckets, registry=self.registry)


class VerifierMetrics(Metrics):
    """What the verifier counts. `record_round` takes most of it from a round's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_running = self.gauge("num_requests_running", "Sessions in execution.")
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Sessions waiting to be admitted.")
        self.num_requests_speculating = self.gauge(
            "num_requests_speculating", "Sessions whose drafter may draft: none while drafts do not pay at this load."
        )
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens processed.")
        self.cached_prompt_tokens = self.counter(
            "prefix_cache_hits", "Prompt tokens whose keys were found in the cache instead of being computed."
        )
        self.generation_tokens = self.counter("generation_tokens", "Output tokens committed.")
        self.num_kv_blocks = self.gauge("num_kv_blocks", "Blocks of the key-value cache.")
        self.num_kv_blocks_used = self.gauge("num_kv_blocks_used", "Blocks of the key-value cache that sessions hold.")
        self.preemptions = self.counter("num_preemptions", "Sessions that gave their blocks back before their end.")
        self.cache_inconsistencies = self.counter(
            "cache_inconsistencies", "Checks that found blocks counted wrongly. Anything but 0 is a fault."
        )
        self.step_rows = self.histogram("verifier_step_rows", "Rows of a forward pass.", _STEP_ROW_BUCKETS)
        self.step_seconds = self.histogram("verifier_step_seconds", "A step of the engine, its forward pass included.")
        self.forward_seconds = self.histogram("verifier_forward_seconds", "The forward pass of a step.")
        self.request_success = self.counter("request_success", "Outputs that ended, by reason.", "finished_reason")
        self.num_drafts = self.counter("spec_decode_num_drafts", "Drafts verified.")
        self.num_draft_tokens = self.counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.num_accepted_tokens = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.num_accepted_tokens_per_pos = self.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in the draft.", "position"
        )
        self.stale_drafts = self.counter("stale_drafts", "Drafts that were dropped, by reason.", "reason")
        self.refused_drafts = self.counter("refused_drafts", "Drafts that were refused, by reason.", "reason")
        self.fallback_decodes = self.counter(
            "fallback_decodes", "Rounds decoded alone because an attached drafter did not deliver in time."
        )
        self.verify_seconds = self.histogram("verify_seconds", "Forward pass of a round.")
        self.queue_seconds = self.histogram("queue_seconds", "From a draft's arrival to the start of its forward pass.")
        self.draft_seconds = self.histogram("draft_seconds", "A drafter's own time for a draft, as it reports it.")
        self.round_trip_seconds = self.histogram(
            "round_trip_seconds", "From a verdict's departure to the next draft's arrival, less the draft's own time."
        )

    def record_round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None:
        """One commit of one session."""
        self.generation_tokens.inc(num_committed_tokens)
        if statistics.num_draft_tokens > 0:
            self.num_drafts.inc()
            self.num_draft_tokens.inc(statistics.num_draft_tokens)
            self.num_accepted_tokens.inc(statistics.num_accepted_tokens)
            for position in range(statistics.num_accepted_tokens):
                self.num_accepted_tokens_per_pos.labels(position).inc()
        if statistics.fallback_decode:
            self.fallback_decodes.inc()
        self.verify_seconds.observe(statistics.verify_forward_time_s)
        self.queue_seconds.observe(statistics.queue_time_s)
        if statistics.draft_time_s is not None:
            self.draft_seconds.observe(statistics.draft_time_s)
        if statistics.round_trip_time_s is not None:
            self.round_trip_seconds.observe(statistics.round_trip_time_s)


class DrafterMetrics(Metrics):
    """What a drafter counts: its own view, so that a drafter's fault shows where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_running = self.gauge("num_requests_running", "Sessions that this drafter is attached to.")
        self.num_drafts = self.counter("spec_decode_num_drafts", "Drafts sent.")
        self.num_draft_tokens = self.counter("spec_decode_num_draft_tokens", "Draft tokens sent.")
        self.num_accepted_tokens = self.counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.stale_drafts = self.counter("stale_drafts", "Drafts that the verifier dropped, by reason.", "reason")
        self.refused_drafts = self.counter("refused_drafts", "Drafts that the verifier refused, by reason.", "reason")
        self.draft_budget = self.histogram(
            "draft_budget", "What the verifier allows a draft, each time that one is begun.", _DRAFT_BUDGET_BUCKETS
        )
        self.draft_seconds = self.histogram("draft_seconds", "Time to make a draft.")
        self.round_trip_seconds = self.histogram(
            "round_trip_seconds", "From a draft's departure to its answer, the verifier's work included."
        )


class OrchestratorMetrics(Metrics):
    """What the orchestrator counts: the client's view."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests_running = self.gauge("num_requests_running", "Streams being served.")
        self.num_requests_waiting = self.gauge("num_requests_waiting", "Streams without a verifier yet.")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of requests served.")
        self.generation_tokens = self.counter("generation_tokens", "Output tokens delivered.")
        self.request_success = self.counter("request_success", "Outputs that ended, by reason.", "finished_reason")
        self.sessions_reaped = self.counter(
            "sessions_reaped", "Sessions found without an owner: freed (never opened) or abandoned.", "outcome"
        )
        self.time_to_first_token_seconds = self.histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first output token.", _FIRST_TOKEN_BUCKETS_S
        )
        self.failovers = self.counter("failovers", "Sessions that went on at another verifier after they lost theirs.")
        self.failover_seconds = self.histogram(
            "failover_seconds", "From the loss of a session's verifier until another has it.", _FIRST_TOKEN_BUCKETS_S
        )


class MetricsExporter:
    """Serves a registry at http://endpoint/metrics until closed, from a thread of its own.

    Raises ValueError for an address other than loopback without `insecure_bind`, OSError where the port is taken.
    """

    def __init__(self, metrics: Metrics, listen: str, *, insecure_bind: bool = False) -> None:
        if not (insecure_bind or is_loopback(listen)):
            raise ValueError(f"{listen} can be reached from other machines; that needs insecure_bind")
        host, port = parse_endpoint(listen)
        self._server, self._thread = start_http_server(port, host, registry=metrics.registry)
        self.endpoint = format_endpoint(host, self._server.server_port)

    def close(self) -> None:
        """Stops listening. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_SHUTDOWN_TIMEOUT_S)
        self._server.server_close()

    def __enter__(self) -> "MetricsExporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
