"""Frames of Generate and Resume, and the orchestrator's word to a drafter."""

from typing import assert_never

from specdec.errors import MalformedRequestError
from specdec.ids import AttachmentId, Epoch
from specdec.messages import AttachSession, Delta, Finished, GenerationEvent, PromptLogprobs, Started
from specdec.params import MAX_SAMPLES
from specdec.v1 import drafter_pb2, generation_pb2
from specdec.wire.convert.enums import ACCEPTANCE_RULE, FINISH_REASON
from specdec.wire.convert.logprobs import (
    position_logprobs_from_pb,
    position_logprobs_to_pb,
    prompt_logprobs_from_pb,
    prompt_logprobs_to_pb,
)
from specdec.wire.convert.params import sampling_from_pb, sampling_to_pb, speculation_from_pb, speculation_to_pb
from specdec.wire.convert.scalars import bytes_from_pb, natural_from_pb, session_id_from_pb
from specdec.wire.convert.statistics import (
    round_statistics_from_pb,
    round_statistics_to_pb,
    speculative_statistics_from_pb,
    speculative_statistics_to_pb,
    usage_from_pb,
    usage_to_pb,
)

MAX_ATTACH_KEY_BYTES = 64


def generation_event_to_pb(event: GenerationEvent) -> generation_pb2.GenerationEvent:
    match event:
        case Started():
            return generation_pb2.GenerationEvent(
                started=generation_pb2.Started(
                    session_id=event.session_id,
                    model=event.model,
                    seed=event.seed,
                    acceptance_rule=ACCEPTANCE_RULE.to_pb(event.acceptance_rule),
                    num_prompt_tokens=event.num_prompt_tokens,
                    numerics_fingerprint=event.numerics_fingerprint,
                    sample_session_ids=event.sample_session_ids,
                )
            )
        case PromptLogprobs():
            return generation_pb2.GenerationEvent(prompt_logprobs=prompt_logprobs_to_pb(event))
        case Delta():
            return generation_pb2.GenerationEvent(
                delta=generation_pb2.Delta(
                    text=event.text,
                    token_ids=event.token_ids,
                    position=event.position,
                    round=round_statistics_to_pb(event.round),
                    token_texts=event.token_texts,
                    logprobs=position_logprobs_to_pb(event.logprobs),
                    sample_index=event.sample_index,
                )
            )
        case Finished():
            return generation_pb2.GenerationEvent(
                finished=generation_pb2.Finished(
                    reason=FINISH_REASON.to_pb(event.reason),
                    usage=usage_to_pb(event.usage),
                    speculative=speculative_statistics_to_pb(event.speculative),
                    text=event.text,
                    sample_index=event.sample_index,
                    num_failovers=event.num_failovers,
                    numerics_changed=event.numerics_changed,
                )
            )
        case _:
            assert_never(event)


def generation_event_from_pb(message: generation_pb2.GenerationEvent) -> GenerationEvent:
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                session_id=session_id_from_pb(started.session_id),
                model=started.model,
                seed=started.seed,
                acceptance_rule=ACCEPTANCE_RULE.from_pb(started.acceptance_rule),
                num_prompt_tokens=started.num_prompt_tokens,
                numerics_fingerprint=started.numerics_fingerprint,
                sample_session_ids=tuple(session_id_from_pb(name) for name in started.sample_session_ids),
            )
        case "prompt_logprobs":
            return prompt_logprobs_from_pb(message.prompt_logprobs)
        case "delta":
            delta = message.delta
            return Delta(
                text=delta.text,
                token_ids=tuple(delta.token_ids),
                position=delta.position,
                round=round_statistics_from_pb(delta.round),
                token_texts=tuple(delta.token_texts),
                logprobs=position_logprobs_from_pb(delta.logprobs),
                sample_index=natural_from_pb(delta.sample_index, "sample_index"),
            )
        case "finished":
            finished = message.finished
            return Finished(
                reason=FINISH_REASON.from_pb(finished.reason),
                usage=usage_from_pb(finished.usage),
                speculative=speculative_statistics_from_pb(finished.speculative),
                text=finished.text,
                sample_index=natural_from_pb(finished.sample_index, "sample_index"),
                num_failovers=natural_from_pb(finished.num_failovers, "num_failovers"),
                numerics_changed=finished.numerics_changed,
            )
        case _:
            raise MalformedRequestError("a generation event without an event", field="event")


def attach_session_to_pb(attach: AttachSession) -> drafter_pb2.AttachSessionRequest:
    return drafter_pb2.AttachSessionRequest(
        session_id=attach.session_id,
        epoch=attach.epoch,
        verifier_endpoint=attach.verifier_endpoint,
        attachment_id=attach.attachment_id,
        attach_key=attach.attach_key,
        sampling=sampling_to_pb(attach.sampling),
        speculation=speculation_to_pb(attach.speculation),
        known_token_ids=attach.known_token_ids,
        prompt_length=attach.prompt_length,
        acceptance_rule=ACCEPTANCE_RULE.to_pb(attach.acceptance_rule),
        sample_index=attach.sample_index,
    )


def attach_session_from_pb(message: drafter_pb2.AttachSessionRequest) -> AttachSession:
    """Raises MalformedRequestError where the prompt is longer than the tokens given, or an id is below 1."""
    if not 0 <= message.prompt_length <= len(message.known_token_ids):
        raise MalformedRequestError("prompt_length: not within known_token_ids", field="prompt_length")
    return AttachSession(
        session_id=session_id_from_pb(message.session_id),
        epoch=Epoch(natural_from_pb(message.epoch, "epoch", low=1)),
        verifier_endpoint=message.verifier_endpoint,
        attachment_id=AttachmentId(natural_from_pb(message.attachment_id, "attachment_id", low=1)),
        attach_key=bytes_from_pb(message.attach_key, "attach_key", 1, MAX_ATTACH_KEY_BYTES),
        sampling=sampling_from_pb(message.sampling),
        speculation=speculation_from_pb(message.speculation),
        known_token_ids=tuple(message.known_token_ids),
        prompt_length=message.prompt_length,
        acceptance_rule=ACCEPTANCE_RULE.from_pb(message.acceptance_rule),
        sample_index=natural_from_pb(message.sample_index, "sample_index", high=MAX_SAMPLES - 1),
    )
