"""What a request asks for. What is absent on the wire is the default of the dataclass."""

from specdec.errors import EmptyPromptError, InvalidParameterError, PromptTooLongError
from specdec.params import (
    MAX_LISTED_TOKENS,
    MAX_STOP_STRINGS,
    ChatMessage,
    GenerationSpec,
    Prompt,
    SamplingParams,
    SpeculationOptions,
    StopCriteria,
)
from specdec.v1 import common_pb2 as pb
from specdec.wire.convert.enums import ACCEPTANCE_RULE
from specdec.wire.convert.scalars import duration_from_pb, optional_duration_to_pb

MAX_CHAT_MESSAGES = 10_000
_DEFAULT_SAMPLING = SamplingParams()


def _bounded(size: int, limit: int, field: str) -> None:
    if size > limit:
        raise InvalidParameterError(f"{field}: at most {limit}", field=field)


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParameters:
    return pb.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        acceptance_rule=ACCEPTANCE_RULE.to_pb(sampling.acceptance_rule),
    )


def sampling_from_pb(message: pb.SamplingParameters) -> SamplingParams:
    """Lengths and the rule are checked here, ranges by `validated()`."""
    for field in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
        _bounded(len(getattr(message, field)), MAX_LISTED_TOKENS, field)
    default = _DEFAULT_SAMPLING
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else default.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else default.top_p,
        min_p=message.min_p,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else default.repetition_penalty
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        min_tokens=message.min_tokens,
        seed=message.seed if message.HasField("seed") else None,
        acceptance_rule=ACCEPTANCE_RULE.optional_from_pb(message.acceptance_rule),
    )


def stop_to_pb(stop: StopCriteria) -> pb.StopCriteria:
    return pb.StopCriteria(
        max_new_tokens=stop.max_new_tokens,
        stop_strings=stop.stop_strings,
        stop_token_ids=stop.stop_token_ids,
        ignore_end_of_sequence=stop.ignore_end_of_sequence,
    )


def stop_from_pb(message: pb.StopCriteria) -> StopCriteria:
    _bounded(len(message.stop_strings), MAX_STOP_STRINGS, "stop_strings")
    _bounded(len(message.stop_token_ids), MAX_LISTED_TOKENS, "stop_token_ids")
    return StopCriteria(
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_end_of_sequence=message.ignore_end_of_sequence,
    )


def speculation_to_pb(speculation: SpeculationOptions) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(
        disabled=speculation.disabled,
        max_draft_tokens=speculation.max_draft_tokens,
        max_draft_wait=optional_duration_to_pb(speculation.max_draft_wait_s),
    )


def speculation_from_pb(message: pb.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        disabled=message.disabled,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        max_draft_wait_s=(
            duration_from_pb(message.max_draft_wait, "max_draft_wait") if message.HasField("max_draft_wait") else None
        ),
    )


def generation_spec_to_pb(spec: GenerationSpec) -> pb.GenerationSpec:
    message = pb.GenerationSpec(
        model=spec.model,
        sampling=sampling_to_pb(spec.sampling),
        stop=stop_to_pb(spec.stop),
        speculation=speculation_to_pb(spec.speculation),
        num_logprobs=spec.num_logprobs,
        num_samples=spec.num_samples,
        num_prompt_logprobs=spec.num_prompt_logprobs,
        same_numerics_only=spec.same_numerics_only,
    )
    if isinstance(spec.prompt, str):
        message.text = spec.prompt
    elif spec.prompt and isinstance(spec.prompt[0], ChatMessage):
        turns = [turn for turn in spec.prompt if isinstance(turn, ChatMessage)]
        message.chat.messages.extend(pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns)
    else:
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(token_id for token_id in spec.prompt if isinstance(token_id, int))
    return message


def _prompt_from_pb(message: pb.GenerationSpec) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "chat":
            if len(message.chat.messages) > MAX_CHAT_MESSAGES:
                raise PromptTooLongError(f"at most {MAX_CHAT_MESSAGES} turns")
            return tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages)
        case "tokens":
            return tuple(message.tokens.token_ids)
        case _:
            raise EmptyPromptError("the request has no prompt")


def generation_spec_from_pb(message: pb.GenerationSpec) -> GenerationSpec:
    """Ranges are checked by `validated()`, which the server calls next.

    Raises:
        EmptyPromptError: there is no prompt.
        PromptTooLongError: more turns than any context holds.
        MalformedRequestError, InvalidParameterError: something else cannot be read.
    """
    return GenerationSpec(
        prompt=_prompt_from_pb(message),
        model=message.model,
        sampling=sampling_from_pb(message.sampling),
        stop=stop_from_pb(message.stop),
        speculation=speculation_from_pb(message.speculation),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_samples=message.num_samples if message.HasField("num_samples") else 1,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        same_numerics_only=message.same_numerics_only,
    )
