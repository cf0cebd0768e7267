"""What sessions at the same verifier measure together: its verify times, and the draft model against its target."""

import dataclasses

from drafter_service.draft_length import ModelDrafts
from drafter_service.verify_times import VerifyTimes


@dataclasses.dataclass(frozen=True)
class SharedMeasurements:
    """One for each verifier endpoint. Written and read on the event loop's thread."""

    verify_times: VerifyTimes = dataclasses.field(default_factory=VerifyTimes)
    model_drafts: ModelDrafts = dataclasses.field(default_factory=ModelDrafts)
