"""OpenSession: what the owner of a session asks of the verifier, and what the verifier tells it."""

from typing import assert_never

from specdec.errors import MalformedRequestError
from specdec.ids import AttachmentId, Epoch, Round
from specdec.messages import (
    AttachmentChange,
    Commit,
    Draining,
    Fenced,
    Opened,
    OpenSession,
    PromptLogprobs,
    SessionEvent,
    SessionFinished,
)
from specdec.params import MAX_SAMPLES, validate_tenant
from specdec.v1 import verifier_pb2 as pb
from specdec.wire.convert.enums import ACCEPTANCE_RULE, ATTACH_REFUSAL, ATTACHMENT_STATE, DETACH_REASON, FINISH_REASON
from specdec.wire.convert.logprobs import (
    position_logprobs_from_pb,
    position_logprobs_to_pb,
    prompt_logprobs_from_pb,
    prompt_logprobs_to_pb,
)
from specdec.wire.convert.params import generation_spec_from_pb, generation_spec_to_pb
from specdec.wire.convert.scalars import (
    bytes_from_pb,
    duration_from_pb,
    duration_to_pb,
    natural_from_pb,
    session_id_from_pb,
)
from specdec.wire.convert.statistics import (
    round_statistics_from_pb,
    round_statistics_to_pb,
    speculative_statistics_from_pb,
    speculative_statistics_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from specdec.wire.convert.status import numerics_from_pb, numerics_to_pb

MIN_OWNER_NONCE_BYTES = 16
MAX_OWNER_NONCE_BYTES = 64
MAX_SESSION_TOKENS = 1 << 20
"""More is refused unread: no model that is served here has such a context."""


def open_session_to_pb(request: OpenSession) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        session_id=request.session_id,
        epoch=request.epoch,
        owner_nonce=request.owner_nonce,
        spec=generation_spec_to_pb(request.spec),
        committed_token_ids=request.committed_token_ids,
        prompt_length=request.prompt_length,
        tenant=request.tenant,
        sample_index=request.sample_index,
        recorded_token_ids=request.recorded_token_ids,
        recorded_epoch=request.recorded_epoch,
    )


def open_session_from_pb(message: pb.OpenSessionRequest) -> OpenSession:
    """Raises what `generation_spec_from_pb` does, and of the error tree what names any other field."""
    for field, num_tokens in (
        ("committed_token_ids", len(message.committed_token_ids)),
        ("recorded_token_ids", len(message.recorded_token_ids)),
    ):
        if num_tokens > MAX_SESSION_TOKENS:
            raise MalformedRequestError(f"{field}: more tokens than any context takes", field=field)
    if message.recorded_token_ids and not 1 <= message.recorded_epoch <= message.epoch:
        raise MalformedRequestError("recorded_epoch: not the epoch of an earlier owner", field="recorded_epoch")
    num_committed = len(message.committed_token_ids)
    if not 0 <= message.prompt_length <= num_committed:
        raise MalformedRequestError("prompt_length: not within committed_token_ids", field="prompt_length")
    return OpenSession(
        session_id=session_id_from_pb(message.session_id),
        epoch=Epoch(natural_from_pb(message.epoch, "epoch", low=1)),
        owner_nonce=bytes_from_pb(message.owner_nonce, "owner_nonce", MIN_OWNER_NONCE_BYTES, MAX_OWNER_NONCE_BYTES),
        spec=generation_spec_from_pb(message.spec),
        committed_token_ids=tuple(message.committed_token_ids),
        prompt_length=message.prompt_length,
        tenant=validate_tenant(message.tenant),
        sample_index=natural_from_pb(message.sample_index, "sample_index", high=MAX_SAMPLES - 1),
        recorded_token_ids=tuple(message.recorded_token_ids),
        recorded_epoch=Epoch(natural_from_pb(message.recorded_epoch, "recorded_epoch")),
    )


def session_event_to_pb(event: SessionEvent) -> pb.SessionEvent:
    match event:
        case Opened():
            return pb.SessionEvent(opened=_opened_to_pb(event))
        case PromptLogprobs():
            return pb.SessionEvent(prompt_logprobs=prompt_logprobs_to_pb(event))
        case Commit():
            return pb.SessionEvent(commit=_commit_to_pb(event))
        case Draining():
            return pb.SessionEvent(draining=pb.Draining(grace=duration_to_pb(event.grace_s)))
        case SessionFinished():
            return pb.SessionEvent(finished=_session_finished_to_pb(event))
        case Fenced():
            return pb.SessionEvent(fenced=pb.Fenced(highest_epoch=event.highest_epoch))
        case AttachmentChange():
            return pb.SessionEvent(attachment_change=_attachment_change_to_pb(event))
        case _:
            assert_never(event)


def session_event_from_pb(message: pb.SessionEvent) -> SessionEvent:
    match message.WhichOneof("event"):
        case "opened":
            return _opened_from_pb(message.opened)
        case "prompt_logprobs":
            return prompt_logprobs_from_pb(message.prompt_logprobs)
        case "commit":
            return _commit_from_pb(message.commit)
        case "draining":
            return Draining(grace_s=duration_from_pb(message.draining.grace, "grace"))
        case "finished":
            return _session_finished_from_pb(message.finished)
        case "fenced":
            return Fenced(highest_epoch=Epoch(message.fenced.highest_epoch))
        case "attachment_change":
            return _attachment_change_from_pb(message.attachment_change)
        case _:
            raise MalformedRequestError("a session event without an event", field="event")


def _opened_to_pb(opened: Opened) -> pb.Opened:
    return pb.Opened(
        attach_secret=opened.attach_secret,
        prompt_token_ids=opened.prompt_token_ids,
        kept_token_ids=opened.kept_token_ids,
        kept_epoch=opened.kept_epoch,
        acceptance_rule=ACCEPTANCE_RULE.to_pb(opened.acceptance_rule),
        numerics=numerics_to_pb(opened.numerics),
        model=opened.model,
        max_new_tokens=opened.max_new_tokens,
    )


def _opened_from_pb(message: pb.Opened) -> Opened:
    return Opened(
        attach_secret=message.attach_secret,
        prompt_token_ids=tuple(message.prompt_token_ids),
        acceptance_rule=ACCEPTANCE_RULE.from_pb(message.acceptance_rule),
        numerics=numerics_from_pb(message.numerics),
        model=message.model,
        max_new_tokens=message.max_new_tokens,
        kept_token_ids=tuple(message.kept_token_ids),
        kept_epoch=Epoch(message.kept_epoch),
    )


def _commit_to_pb(commit: Commit) -> pb.Commit:
    return pb.Commit(
        round=commit.round,
        base_position=commit.base_position,
        token_ids=commit.token_ids,
        text=commit.text,
        statistics=round_statistics_to_pb(commit.statistics),
        cached_length=commit.cached_length,
        token_texts=commit.token_texts,
        logprobs=position_logprobs_to_pb(commit.logprobs),
    )


def _commit_from_pb(message: pb.Commit) -> Commit:
    return Commit(
        round=Round(message.round),
        base_position=message.base_position,
        token_ids=tuple(message.token_ids),
        text=message.text,
        statistics=round_statistics_from_pb(message.statistics),
        cached_length=message.cached_length,
        token_texts=tuple(message.token_texts),
        logprobs=position_logprobs_from_pb(message.logprobs),
    )


def _session_finished_to_pb(finished: SessionFinished) -> pb.SessionFinished:
    return pb.SessionFinished(
        reason=FINISH_REASON.to_pb(finished.reason),
        usage=usage_to_pb(finished.usage),
        speculative=speculative_statistics_to_pb(finished.speculative),
        text=finished.text,
    )


def _session_finished_from_pb(message: pb.SessionFinished) -> SessionFinished:
    return SessionFinished(
        reason=FINISH_REASON.from_pb(message.reason),
        usage=usage_from_pb(message.usage),
        speculative=speculative_statistics_from_pb(message.speculative),
        text=message.text,
    )


def _attachment_change_to_pb(change: AttachmentChange) -> pb.AttachmentChange:
    return pb.AttachmentChange(
        attachment_id=change.attachment_id,
        state=ATTACHMENT_STATE.to_pb(change.state),
        refusal=ATTACH_REFUSAL.to_pb(change.refusal),
        detach_reason=DETACH_REASON.to_pb(change.detach_reason),
    )


def _attachment_change_from_pb(message: pb.AttachmentChange) -> AttachmentChange:
    return AttachmentChange(
        attachment_id=AttachmentId(message.attachment_id),
        state=ATTACHMENT_STATE.from_pb(message.state),
        refusal=ATTACH_REFUSAL.optional_from_pb(message.refusal),
        detach_reason=DETACH_REASON.optional_from_pb(message.detach_reason),
    )
