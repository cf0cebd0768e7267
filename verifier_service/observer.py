"""What the engine tells those who count. The engine knows the protocol, never a metrics library."""

from typing import Protocol

from specdec.messages import DropReason, RefusalReason, RoundStatistics
from specdec.params import FinishReason
from specdec.telemetry import VerifierMetrics


class EngineObserver(Protocol):
    """Called on the engine's thread; must return at once."""

    def sessions(self, num_active: int, num_waiting: int) -> None:
        """The number of sessions may have changed."""

    def round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None:
        """A session committed tokens."""

    def finished(self, reason: FinishReason, num_prompt_tokens: int) -> None:
        """An output ended."""

    def draft_dropped(self, reason: DropReason) -> None:
        """A draft was not used."""

    def draft_refused(self, reason: RefusalReason) -> None:
        """A draft broke a rule."""


class MetricsObserver:
    """Counts for Prometheus."""

    def __init__(self, metrics: VerifierMetrics) -> None:
        self._metrics = metrics

    def sessions(self, num_active: int, num_waiting: int) -> None:
        self._metrics.num_requests_running.set(num_active)
        self._metrics.num_requests_waiting.set(num_waiting)

    def round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None:
        self._metrics.record_round(statistics, num_committed_tokens)

    def finished(self, reason: FinishReason, num_prompt_tokens: int) -> None:
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.request_success.labels(reason.value.lower()).inc()

    def draft_dropped(self, reason: DropReason) -> None:
        self._metrics.stale_drafts.labels(reason.value.lower()).inc()

    def draft_refused(self, reason: RefusalReason) -> None:
        self._metrics.refused_drafts.labels(reason.value.lower()).inc()
