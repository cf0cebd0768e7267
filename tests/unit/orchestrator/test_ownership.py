"""Which epoch an owner goes on in while the store does not answer."""

import dataclasses

from orchestrator.claim import Claim
from orchestrator.ownership import Ownership
from orchestrator.progress import Progress
from orchestrator.session_store import SessionStore, StoreSettings
from specdec.ids import Epoch, SessionId
from specdec.params import GenerationSpec

NOWHERE = "redis://127.0.0.1:1/0"
CLAIM = Claim(SessionId("s"), b"n" * 16, GenerationSpec(prompt="hello"))


async def _epochs_without_store(claim: Claim, *floors: int) -> list[Epoch]:
    progress = Progress(claim)
    async with SessionStore(StoreSettings(NOWHERE)) as store:
        ownership = Ownership(claim, progress, store, strict=False, store_is_reachable=lambda: False)
        epochs = []
        for floor in floors:
            await ownership.next_epoch(floor)
            epochs.append(ownership.epoch)
    return epochs


async def test_without_a_store_every_claim_is_above_the_one_before_and_above_what_a_verifier_knows() -> None:
    assert await _epochs_without_store(CLAIM, 0, 0, 7) == [1, 2, 8]


async def test_who_read_a_record_and_then_lost_the_store_goes_on_above_the_records_epoch() -> None:
    """A verifier refuses tokens of an epoch that is not older than the claim, and the client its output with them."""
    claim = dataclasses.replace(CLAIM, recorded_token_ids=(1, 2), recorded_epoch=Epoch(3))
    assert await _epochs_without_store(claim, 0) == [4]
