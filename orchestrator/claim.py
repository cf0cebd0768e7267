"""What a session's owner asks a verifier for. Plain data."""

import dataclasses
import time

from orchestrator.record import SessionRecord
from orchestrator.samples import Placement
from specdec.ids import Epoch, SessionId
from specdec.params import GenerationSpec


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is to be opened.

    `committed_token_ids` (prompt and output) are those of a session that goes on, and `numerics_fingerprint` is that of
    the verifier which decided them. Where `unread_prompt_of` is a record, nobody knows the tokens of the session's
    prompt: `prompt_length` is 0, `committed_token_ids` is output alone, and what a verifier makes of the prompt in
    `spec` is held to that record. `recorded_token_ids` is output beyond them that the record has and nobody may have
    seen. `placement` is shared by the samples of one request: the first that is opened decides it, the others follow.
    """

    session_id: SessionId
    owner_nonce: bytes
    spec: GenerationSpec
    committed_token_ids: tuple[int, ...] = ()
    prompt_length: int = 0
    tenant: str = ""
    sample_index: int = 0
    placement: Placement | None = None
    numerics_fingerprint: str = ""
    recorded_token_ids: tuple[int, ...] = ()
    recorded_epoch: Epoch = Epoch(0)
    unread_prompt_of: SessionRecord | None = None
    deadline: float | None = None
    """When the client gives up, by the monotonic clock. None: never."""

    @property
    def must_be_new(self) -> bool:
        return not self.committed_token_ids and self.unread_prompt_of is None

    @property
    def is_past_deadline(self) -> bool:
        """Whether the client has given up."""
        return self.deadline is not None and time.monotonic() >= self.deadline
