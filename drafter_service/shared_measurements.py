"""What sessions at the same verifier measure together: its verify times, and the draft model against its target."""

import dataclasses

from drafter_service.draft_length import ModelDrafts
from drafter_service.verify_times import VerifyTimes

WARMING_SHARE, MAX_PAUSE_S = 0.02, 30.0
"""Of the time, for caches of sessions without a budget: a drafter may stand on the verifier's own cores."""


class UnwantedWarming:
    """One chunk at a time for sessions without a budget, and pauses between. Times are arguments."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._started_at: float | None = None

    def may_start(self, now: float) -> bool:
        """Whether no chunk is running and the share of the time is not used up."""
        return self._started_at is None and now >= self._next_at

    def start(self, now: float) -> None:
        """A chunk begins."""
        self._started_at = now

    def end(self, now: float) -> None:
        """It is done."""
        if self._started_at is not None:
            self._next_at = now + min((now - self._started_at) / WARMING_SHARE, MAX_PAUSE_S)
            self._started_at = None


@dataclasses.dataclass(frozen=True)
class SharedMeasurements:
    """One for each verifier endpoint. Written and read on the event loop's thread."""

    verify_times: VerifyTimes = dataclasses.field(default_factory=VerifyTimes)
    model_drafts: ModelDrafts = dataclasses.field(default_factory=ModelDrafts)
    unwanted_warming: UnwantedWarming = dataclasses.field(default_factory=UnwantedWarming)
