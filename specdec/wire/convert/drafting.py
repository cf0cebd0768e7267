"""The Verify stream: drafter to verifier and back.

One stream carries many sessions, so what a single draft gets wrong must not break it: values of a draft pass unchecked
to the verifier, which answers Refused or Dropped. Only a frame that cannot be addressed raises.
"""

from typing import assert_never

from specdec.errors import InvalidParameterError, MalformedRequestError
from specdec.ids import AttachmentId, DraftSequence, Epoch, Round
from specdec.messages import (
    Addressed,
    Advance,
    Attach,
    Attached,
    AttachRefused,
    BudgetUpdate,
    Detach,
    Detached,
    Draft,
    DrafterMessage,
    Dropped,
    Refused,
    SparseDistribution,
    Verdict,
    VerifierMessage,
)
from specdec.params import MAX_DRAFT_NODES
from specdec.v1 import verifier_pb2 as pb
from specdec.wire.convert.enums import ATTACH_REFUSAL, DETACH_REASON, DROP_REASON, FINISH_REASON, REFUSAL_REASON
from specdec.wire.convert.scalars import duration_from_pb, duration_to_pb, session_id_from_pb


def verify_request_to_pb(addressed: Addressed) -> pb.VerifyRequest:
    """Raises TypeError for a message of the other direction."""
    request = pb.VerifyRequest(attachment_id=addressed.attachment_id, session_id=addressed.session_id)
    match addressed.message:
        case Attach() as attach:
            request.attach.CopyFrom(_attach_to_pb(attach))
        case Draft() as draft:
            request.draft.CopyFrom(_draft_to_pb(draft))
        case Detach():
            request.detach.SetInParent()
        case _:
            raise TypeError(f"{type(addressed.message).__name__} does not go from drafter to verifier")
    return request


def verify_request_from_pb(message: pb.VerifyRequest) -> Addressed:
    return Addressed(
        session_id=session_id_from_pb(message.session_id),
        attachment_id=AttachmentId(message.attachment_id),
        message=_drafter_message_from_pb(message),
    )


def _drafter_message_from_pb(message: pb.VerifyRequest) -> DrafterMessage:
    match message.WhichOneof("message"):
        case "attach":
            return _attach_from_pb(message.attach)
        case "draft":
            return _draft_from_pb(message.draft)
        case "detach":
            return Detach()
        case _:
            raise MalformedRequestError("a verify request without a message", field="message")


def verify_response_to_pb(addressed: Addressed) -> pb.VerifyResponse:
    """Raises TypeError for a message of the other direction."""
    message = addressed.message
    if isinstance(message, Attach | Draft | Detach):
        raise TypeError(f"{type(message).__name__} does not go from verifier to drafter")
    response = _verifier_message_to_pb(message)
    response.attachment_id = addressed.attachment_id
    response.session_id = addressed.session_id
    return response


def _verifier_message_to_pb(message: VerifierMessage) -> pb.VerifyResponse:
    match message:
        case Attached():
            return pb.VerifyResponse(
                attached=pb.Attached(
                    committed_token_ids=message.committed_token_ids,
                    start_position=message.start_position,
                    seed=message.seed,
                    draft_budget=message.draft_budget,
                )
            )
        case AttachRefused():
            refusal = ATTACH_REFUSAL.to_pb(message.reason)
            return pb.VerifyResponse(attach_refused=pb.AttachRefused(reason=refusal, message=message.message))
        case Verdict():
            return pb.VerifyResponse(verdict=_verdict_to_pb(message))
        case Advance():
            return pb.VerifyResponse(advance=_advance_to_pb(message))
        case Dropped():
            return pb.VerifyResponse(
                dropped=pb.Dropped(
                    draft_sequence=message.draft_sequence,
                    reason=DROP_REASON.to_pb(message.reason),
                    committed_length=message.committed_length,
                    missing_token_ids=message.missing_token_ids,
                    draft_budget=message.draft_budget,
                )
            )
        case Refused():
            return pb.VerifyResponse(
                refused=pb.Refused(
                    draft_sequence=message.draft_sequence,
                    reason=REFUSAL_REASON.to_pb(message.reason),
                    message=message.message,
                    committed_length=message.committed_length,
                    missing_token_ids=message.missing_token_ids,
                    draft_budget=message.draft_budget,
                )
            )
        case BudgetUpdate():
            return pb.VerifyResponse(budget_update=pb.BudgetUpdate(draft_budget=message.draft_budget))
        case Detached():
            return pb.VerifyResponse(detached=pb.Detached(reason=DETACH_REASON.to_pb(message.reason)))
        case _:
            assert_never(message)


def verify_response_from_pb(message: pb.VerifyResponse) -> Addressed:
    return Addressed(
        session_id=session_id_from_pb(message.session_id),
        attachment_id=AttachmentId(message.attachment_id),
        message=_verifier_message_from_pb(message),
    )


def _verifier_message_from_pb(message: pb.VerifyResponse) -> VerifierMessage:
    match message.WhichOneof("message"):
        case "attached":
            attached = message.attached
            return Attached(
                committed_token_ids=tuple(attached.committed_token_ids),
                start_position=attached.start_position,
                seed=attached.seed if attached.HasField("seed") else None,
                draft_budget=attached.draft_budget,
            )
        case "attach_refused":
            refusal = ATTACH_REFUSAL.from_pb(message.attach_refused.reason)
            return AttachRefused(reason=refusal, message=message.attach_refused.message)
        case "verdict":
            return _verdict_from_pb(message.verdict)
        case "advance":
            return _advance_from_pb(message.advance)
        case "dropped":
            dropped = message.dropped
            return Dropped(
                draft_sequence=DraftSequence(dropped.draft_sequence),
                reason=DROP_REASON.from_pb(dropped.reason),
                committed_length=dropped.committed_length,
                missing_token_ids=tuple(dropped.missing_token_ids),
                draft_budget=dropped.draft_budget,
            )
        case "refused":
            refused = message.refused
            return Refused(
                draft_sequence=DraftSequence(refused.draft_sequence),
                reason=REFUSAL_REASON.from_pb(refused.reason),
                message=refused.message,
                committed_length=refused.committed_length,
                missing_token_ids=tuple(refused.missing_token_ids),
                draft_budget=refused.draft_budget,
            )
        case "budget_update":
            return BudgetUpdate(draft_budget=message.budget_update.draft_budget)
        case "detached":
            return Detached(reason=DETACH_REASON.from_pb(message.detached.reason))
        case _:
            raise MalformedRequestError("a verify response without a message that is known here", field="message")


def _attach_to_pb(attach: Attach) -> pb.Attach:
    message = pb.Attach(
        epoch=attach.epoch,
        attach_key=attach.attach_key,
        known_length=attach.known_length,
        known_digest=attach.known_digest,
        tokenizer_fingerprint=attach.tokenizer_fingerprint,
        vocabulary_size=attach.vocabulary_size,
        context_limit=attach.context_limit,
        protocol_version=attach.protocol_version,
    )
    if attach.wants_hidden_states:
        message.hidden_states.SetInParent()
    return message


def _attach_from_pb(message: pb.Attach) -> Attach:
    return Attach(
        epoch=Epoch(message.epoch),
        attach_key=message.attach_key,
        known_length=message.known_length,
        known_digest=message.known_digest,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocabulary_size=message.vocabulary_size,
        context_limit=message.context_limit,
        protocol_version=message.protocol_version,
        wants_hidden_states=message.HasField("hidden_states"),
    )


def _draft_to_pb(draft: Draft) -> pb.Draft:
    return pb.Draft(
        epoch=draft.epoch,
        draft_sequence=draft.draft_sequence,
        start_position=draft.start_position,
        draft_token_ids=draft.draft_token_ids,
        parent_indices=draft.parent_indices,
        draft_probs=[pb.SparseDistribution(token_ids=d.token_ids, probs=d.probs) for d in draft.draft_probs],
        draft_time=duration_to_pb(draft.draft_time_s),
    )


def _draft_from_pb(message: pb.Draft) -> Draft:
    try:
        draft_time_s = duration_from_pb(message.draft_time, "draft_time")
    except InvalidParameterError:
        draft_time_s = 0.0  # a figure for statistics is not worth a refusal
    # One node too many is enough to be refused for: what a hostile message brings beyond is not even read.
    return Draft(
        epoch=Epoch(message.epoch),
        draft_sequence=DraftSequence(message.draft_sequence),
        start_position=message.start_position,
        draft_token_ids=tuple(message.draft_token_ids[: MAX_DRAFT_NODES + 1]),
        parent_indices=tuple(message.parent_indices[: MAX_DRAFT_NODES + 1]),
        draft_probs=tuple(
            SparseDistribution(tuple(d.token_ids), tuple(d.probs)) for d in message.draft_probs[: MAX_DRAFT_NODES + 1]
        ),
        draft_time_s=draft_time_s,
    )


def _verdict_to_pb(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        draft_sequence=verdict.draft_sequence,
        round=verdict.round,
        base_position=verdict.base_position,
        num_accepted_tokens=verdict.num_accepted_tokens,
        accepted_node_indices=verdict.accepted_node_indices,
        committed_token_ids=verdict.committed_token_ids,
        committed_length=verdict.committed_length,
        draft_budget=verdict.draft_budget,
        finish_reason=FINISH_REASON.to_pb(verdict.finish_reason),
    )


def _verdict_from_pb(message: pb.Verdict) -> Verdict:
    return Verdict(
        draft_sequence=DraftSequence(message.draft_sequence),
        round=Round(message.round),
        base_position=message.base_position,
        num_accepted_tokens=message.num_accepted_tokens,
        committed_token_ids=tuple(message.committed_token_ids),
        committed_length=message.committed_length,
        draft_budget=message.draft_budget,
        accepted_node_indices=tuple(message.accepted_node_indices),
        finish_reason=FINISH_REASON.optional_from_pb(message.finish_reason),
    )


def _advance_to_pb(advance: Advance) -> pb.Advance:
    return pb.Advance(
        round=advance.round,
        base_position=advance.base_position,
        committed_token_ids=advance.committed_token_ids,
        committed_length=advance.committed_length,
        draft_budget=advance.draft_budget,
        finish_reason=FINISH_REASON.to_pb(advance.finish_reason),
    )


def _advance_from_pb(message: pb.Advance) -> Advance:
    return Advance(
        round=Round(message.round),
        base_position=message.base_position,
        committed_token_ids=tuple(message.committed_token_ids),
        committed_length=message.committed_length,
        draft_budget=message.draft_budget,
        finish_reason=FINISH_REASON.optional_from_pb(message.finish_reason),
    )
