"""What a Resume brings, held to the session's record: the prompt, the request, the tokens that the client received.

Where the record keeps no tokens the client's request brings the prompt again. As token ids it is compared at once; a
text or a conversation only a verifier can read, and what it makes of it is compared before anything is told to the
client. Pure: no store, no verifier.
"""

import dataclasses
from collections.abc import Sequence

from orchestrator.record import SessionRecord
from specdec.errors import NotOfferedError, ResumeMismatchError
from specdec.params import GenerationSpec, Prompt, prompt_token_ids


def prompt_to_resume(record: SessionRecord, given: GenerationSpec | None) -> Prompt:
    """The session's prompt: token ids wherever they are known, else as the request has it.

    Raises:
        NotOfferedError: the record keeps no tokens, and no request came along.
        EmptyPromptError, InvalidParameterError: one that was never a session's.
        ResumeMismatchError: one that asks for something else than the session's.
    """
    if record.token_ids is not None:
        return record.token_ids[: record.prompt_length]
    if given is None:
        raise NotOfferedError("the record keeps no tokens: bring the original request")
    _require_same_request(record, given.validated())
    token_ids = prompt_token_ids(given.prompt)
    return given.prompt if token_ids is None else tuple(token_ids)


def require_possible(record: SessionRecord, received_token_ids: Sequence[int]) -> None:
    """What can be told of the received tokens without the prompt; raises ResumeMismatchError."""
    limit = record.request.stop.max_new_tokens if record.request is not None else None
    is_too_long = limit is not None and len(received_token_ids) > limit
    if is_too_long or any(token_id < 0 for token_id in received_token_ids):
        raise ResumeMismatchError("the received tokens are not the session's")


def require_agreement(
    record: SessionRecord, prompt_token_ids: Sequence[int], received_token_ids: Sequence[int]
) -> None:
    """A client may be behind the record, or ahead of one that lagged; what both have is equal.

    Raises ResumeMismatchError.
    """
    if not record.has_prompt(prompt_token_ids):
        raise ResumeMismatchError("the prompt is not the session's")
    if not record.agrees_with((*prompt_token_ids, *received_token_ids)):
        raise ResumeMismatchError("the received tokens are not the session's")


def _require_same_request(record: SessionRecord, given: GenerationSpec) -> None:
    """What the request says is what the record says; what it leaves to the server was decided when the session began.

    Log-probabilities of the prompt were told then.
    """
    if record.request is None:
        return
    kept = record.request
    own = dataclasses.replace(
        given.of_sample(record.sample_index), prompt=kept.prompt, num_prompt_logprobs=kept.num_prompt_logprobs
    )
    own = dataclasses.replace(
        own,
        model=own.model or kept.model,
        sampling=dataclasses.replace(
            own.sampling,
            seed=kept.sampling.seed if own.sampling.seed is None else own.sampling.seed,
            acceptance_rule=own.sampling.acceptance_rule or kept.sampling.acceptance_rule,
            logit_bias=dict(own.sampling.logit_bias),
        ),
        stop=dataclasses.replace(own.stop, max_new_tokens=own.stop.max_new_tokens or kept.stop.max_new_tokens),
    )
    for part in dataclasses.fields(GenerationSpec):
        if getattr(own, part.name) != getattr(kept, part.name):
            raise ResumeMismatchError("the request is not the session's", field=part.name)
