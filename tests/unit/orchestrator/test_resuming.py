"""What a Resume brings is held to the session's record."""

import dataclasses
from typing import Any

import pytest

from orchestrator.record import RecordState, SessionRecord, decode_request, encode_request
from orchestrator.resuming import prompt_to_resume, require_agreement, require_possible
from specdec.errors import EmptyPromptError, NotOfferedError, ResumeMismatchError, SpecdecError
from specdec.ids import Epoch, Round, digest_tokens
from specdec.params import AcceptanceRule, ChatMessage, GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria

PROMPT = (5, 6, 7)
OUTPUT = (1, 2, 3, 4)
GIVEN = GenerationSpec(
    prompt="three words long",
    sampling=SamplingParams(temperature=0.7, logit_bias={3: 0.1}, banned_token_ids=(9,)),
    stop=StopCriteria(stop_strings=("end",)),
    num_samples=3,
    num_prompt_logprobs=1,
)
IN_FORCE = dataclasses.replace(
    GIVEN,
    num_samples=1,
    num_prompt_logprobs=None,
    model="target",
    sampling=dataclasses.replace(GIVEN.sampling, seed=7, acceptance_rule=AcceptanceRule.COUPLED),
    stop=dataclasses.replace(GIVEN.stop, max_new_tokens=16),
)


def _border(num_output_tokens: int) -> tuple[int, bytes]:
    end = len(PROMPT) + num_output_tokens
    return end, digest_tokens((*PROMPT, *OUTPUT)[:end])[:12]


def _record(**changes: Any) -> SessionRecord:
    """Without tokens; rounds ended at the prompt's end, and after 2 and 3 tokens of output."""
    record = SessionRecord(
        state=RecordState.OPEN,
        epoch=Epoch(1),
        owner_nonce=b"n" * 16,
        round=Round(2),
        request=decode_request(encode_request(IN_FORCE)),
        model="target",
        numerics_fingerprint="bits",
        verifier="v",
        drafter="",
        prompt_length=len(PROMPT),
        committed_length=len(PROMPT) + 3,
        verifier_cached_length=0,
        drafter_cached_length=0,
        prefix_digest=digest_tokens((*PROMPT, *OUTPUT[:3])),
        token_ids=None,
        finish_reason=None,
        tenant="",
        sample_index=1,
        prompt_digest=digest_tokens(PROMPT),
        borders=(_border(0), _border(2), _border(3)),
    )
    return dataclasses.replace(record, **changes)


def test_a_prompt_is_tokens_where_anybody_knows_them_and_else_as_the_request_has_it() -> None:
    kept = _record(token_ids=(*PROMPT, *OUTPUT[:3]))
    assert prompt_to_resume(kept, None) == PROMPT
    chat = (ChatMessage("user", "hello"),)
    for prompt in ("three words long", chat, PROMPT):
        assert prompt_to_resume(_record(), dataclasses.replace(GIVEN, prompt=prompt)) == prompt


def test_a_record_without_tokens_wants_the_request_with_its_prompt() -> None:
    with pytest.raises(NotOfferedError):
        prompt_to_resume(_record(), None)
    with pytest.raises(EmptyPromptError):
        prompt_to_resume(_record(), dataclasses.replace(GIVEN, prompt=()))


def test_a_request_may_name_what_was_decided_for_it_and_leave_open_what_it_left_open() -> None:
    for given in (GIVEN, dataclasses.replace(IN_FORCE, prompt="three words long")):
        assert prompt_to_resume(_record(), given) == "three words long"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "another"},
        {"sampling": dataclasses.replace(GIVEN.sampling, temperature=0.6)},
        {"sampling": dataclasses.replace(GIVEN.sampling, seed=8)},
        {"sampling": dataclasses.replace(GIVEN.sampling, acceptance_rule=AcceptanceRule.ONE_HOT)},
        {"sampling": dataclasses.replace(GIVEN.sampling, logit_bias={})},
        {"stop": dataclasses.replace(GIVEN.stop, max_new_tokens=17)},
        {"stop": dataclasses.replace(GIVEN.stop, stop_strings=())},
        {"speculation": SpeculationOptions(disabled=True)},
        {"num_logprobs": 0},
        {"same_numerics_only": True},
    ],
)
def test_a_request_that_says_otherwise_than_the_session_s_is_refused_and_told_where(changes: dict[str, Any]) -> None:
    with pytest.raises(ResumeMismatchError) as refused:
        prompt_to_resume(_record(), dataclasses.replace(GIVEN, **changes))
    assert refused.value.metadata == {"field": next(iter(changes))}


@pytest.mark.parametrize("length", range(len(OUTPUT) + 1))
def test_a_client_may_be_behind_the_record_at_its_end_or_ahead_of_it(length: int) -> None:
    require_agreement(_record(), PROMPT, OUTPUT[:length])


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ((5, 6), OUTPUT),  # a token short
        ((5, 6, 7, 1), OUTPUT[1:]),  # the same tokens, divided a token later
        ((5, 6, 8), ()),
        ((5, 6, 8), OUTPUT),
        (PROMPT, (1, 3)),  # at a border
        (PROMPT, (2, 2, 3)),
        (PROMPT, (1, 2, 4, 4)),  # a token ahead of the record
    ],
)
def test_another_prompt_and_other_tokens_are_refused(prompt: tuple[int, ...], received: tuple[int, ...]) -> None:
    with pytest.raises(ResumeMismatchError):
        require_agreement(_record(), prompt, received)


def test_another_prompt_is_refused_where_no_end_of_a_round_lies_within_what_the_client_has() -> None:
    behind = _record(borders=(_border(3),))
    require_agreement(behind, PROMPT, OUTPUT[:1])
    with pytest.raises(ResumeMismatchError, match="prompt"):
        require_agreement(behind, (5, 6, 8), OUTPUT[:1])


def test_records_of_servers_that_wrote_no_digest_of_the_prompt_are_resumed() -> None:
    old = _record(prompt_digest=b"")
    require_agreement(old, PROMPT, OUTPUT)
    for prompt, received in (((5, 6), (7, *OUTPUT)), ((5, 6, 7, 1), OUTPUT[1:]), ((5, 6, 8), OUTPUT)):
        with pytest.raises(ResumeMismatchError):
            require_agreement(old, prompt, received)


def test_more_tokens_than_the_session_may_have_and_no_tokens_at_all_are_refused_unread() -> None:
    require_possible(_record(), [1] * 16)
    refused: list[SpecdecError] = []
    for received in ([1] * 17, [1, -1]):
        with pytest.raises(ResumeMismatchError) as raised:
            require_possible(_record(), received)
        refused.append(raised.value)
    assert len(refused) == 2
