"""Messages of a verifier, short to write."""

from collections.abc import Sequence

from specdec.ids import AttachmentId, DraftSequence, Epoch, Round, SessionId
from specdec.messages import Advance, Attached, AttachSession, Dropped, DropReason, Verdict
from specdec.params import AcceptanceRule, FinishReason, SamplingParams, SpeculationOptions


def attach_session(known: Sequence[int], endpoint: str = "127.0.0.1:1", attachment_id: int = 1) -> AttachSession:
    return AttachSession(
        session_id=SessionId("session"),
        epoch=Epoch(1),
        verifier_endpoint=endpoint,
        attachment_id=AttachmentId(attachment_id),
        attach_key=b"k" * 32,
        sampling=SamplingParams(temperature=0.0),
        speculation=SpeculationOptions(),
        known_token_ids=tuple(known),
        prompt_length=len(known),
        acceptance_rule=AcceptanceRule.GREEDY,
    )


def attached(token_ids: Sequence[int] = (), start_position: int = 0, draft_budget: int = 8) -> Attached:
    return Attached(tuple(token_ids), start_position, seed=None, draft_budget=draft_budget)


def verdict(
    sequence: int,
    base: int,
    token_ids: Sequence[int],
    num_accepted: int,
    draft_budget: int = 8,
    finish_reason: FinishReason | None = None,
) -> Verdict:
    return Verdict(
        draft_sequence=DraftSequence(sequence),
        round=Round(sequence),
        base_position=base,
        num_accepted_tokens=num_accepted,
        committed_token_ids=tuple(token_ids),
        committed_length=base + len(token_ids),
        draft_budget=draft_budget,
        finish_reason=finish_reason,
    )


def advance(base: int, token_ids: Sequence[int], draft_budget: int = 8) -> Advance:
    return Advance(Round(1), base, tuple(token_ids), base + len(token_ids), draft_budget)


def dropped(sequence: int, reason: DropReason, length: int, missing: Sequence[int] = ()) -> Dropped:
    return Dropped(DraftSequence(sequence), reason, length, tuple(missing), draft_budget=8)
