"""What the engine tells those who count. The engine knows the protocol, never a metrics library."""

from typing import Protocol

from specdec.messages import DropReason, RefusalReason, RoundStatistics, Usage
from specdec.params import FinishReason
from specdec.telemetry import VerifierMetrics


class EngineObserver(Protocol):
    """Called on the engine's thread; must return at once."""

    def sessions(self, num_active: int, num_waiting: int) -> None:
        """The number of sessions may have changed."""

    def speculating(self, num_sessions: int) -> None:
        """So many may draft now."""

    def step(self, num_rows: int, forward_time_s: float, step_time_s: float) -> None:
        """A forward ran; `step_time_s` is all of its step, the forward included."""

    def blocks(self, num_used: int, num_blocks: int) -> None:
        """Blocks of the cache that sessions hold, of all."""

    def preempted(self) -> None:
        """A session gave its blocks back before its end."""

    def cache_inconsistent(self) -> None:
        """The cache's books do not agree with what sessions hold."""

    def round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None:
        """A session committed tokens."""

    def finished(self, reason: FinishReason, usage: Usage) -> None:
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

    def speculating(self, num_sessions: int) -> None:
        self._metrics.num_requests_speculating.set(num_sessions)

    def step(self, num_rows: int, forward_time_s: float, step_time_s: float) -> None:
        self._metrics.step_rows.observe(num_rows)
        self._metrics.forward_seconds.observe(forward_time_s)
        self._metrics.step_seconds.observe(step_time_s)

    def blocks(self, num_used: int, num_blocks: int) -> None:
        self._metrics.num_kv_blocks_used.set(num_used)
        self._metrics.num_kv_blocks.set(num_blocks)

    def preempted(self) -> None:
        self._metrics.preemptions.inc()

    def cache_inconsistent(self) -> None:
        self._metrics.cache_inconsistencies.inc()

    def round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None:
        self._metrics.record_round(statistics, num_committed_tokens)

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        self._metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(usage.num_cached_prompt_tokens)
        self._metrics.request_success.labels(reason.value.lower()).inc()

    def draft_dropped(self, reason: DropReason) -> None:
        self._metrics.stale_drafts.labels(reason.value.lower()).inc()

    def draft_refused(self, reason: RefusalReason) -> None:
        self._metrics.refused_drafts.labels(reason.value.lower()).inc()
