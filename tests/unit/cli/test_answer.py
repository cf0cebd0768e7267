import dataclasses
import json

import pytest

from specdec.cli.answer import Answer, collect, collect_samples
from specdec.errors import MalformedRequestError
from specdec.messages import PositionLogprobs, PromptLogprobs, TokenLogprob
from specdec.params import NextTokenKind
from tests.unit.cli.frames import STARTED, delta, finished, stream


async def test_text_held_back_to_the_end_belongs_to_the_answer() -> None:
    events = [STARTED, delta(["a", "b"], 1, NextTokenKind.BONUS), finished("c")]
    answer = await collect(stream(events))
    assert answer.text == "abc"
    assert answer.token_ids == (0, 1)


async def test_acceptance_figures_count_draft_tokens_and_drafted_rounds() -> None:
    end = finished(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3)
    answer = await collect(stream([STARTED, end]))
    assert answer.acceptance_rate == 3 / 8
    assert answer.acceptance_length == 2.5


async def test_an_answer_without_drafts_has_no_acceptance_figures() -> None:
    answer = await collect(stream([STARTED, finished()]))
    assert answer.acceptance_rate is None
    assert answer.acceptance_length is None


async def test_the_json_of_an_answer_has_the_promised_keys() -> None:
    answer = await collect(stream([STARTED, delta(["a"], 0, NextTokenKind.PLAIN), finished()]))
    written = json.loads(json.dumps(answer.to_json()))
    assert set(written) == {
        *("model", "seed", "acceptance_rule", "numerics_fingerprint", "numerics_changed", "num_failovers"),
        *("text", "token_ids", "finish_reason", "usage", "speculative"),
    }
    assert written["finish_reason"] == "LENGTH"
    assert written["usage"] == {"num_prompt_tokens": 3, "num_output_tokens": 2, "num_cached_prompt_tokens": 0}


async def test_the_json_tells_the_seed_that_the_server_drew() -> None:
    answer = await collect(stream([STARTED, finished()]))
    assert answer.to_json()["seed"] == STARTED.seed


async def test_a_rate_is_tokens_over_the_whole_time() -> None:
    times = iter([10.0, 10.5, 12.0])
    events = [STARTED, delta(["a", "b"], 1, NextTokenKind.BONUS), finished()]
    answer = await collect(stream(events), clock=lambda: next(times))
    assert answer.first_token_s == 0.5
    assert answer.tokens_per_s == 1.0


async def test_a_stream_that_breaks_off_is_an_error_not_a_short_answer() -> None:
    with pytest.raises(MalformedRequestError):
        await collect(stream([STARTED, delta(["a"], 0, NextTokenKind.PLAIN)]))


async def test_samples_that_come_interleaved_are_told_apart_and_each_one_is_told_when_it_is_whole() -> None:
    some = PositionLogprobs(TokenLogprob(0, -0.5))
    first = dataclasses.replace(delta(["a"], 0, NextTokenKind.PLAIN), logprobs=(some,))
    second = dataclasses.replace(delta(["b"], 0, NextTokenKind.PLAIN), sample_index=1)
    end = dataclasses.replace(finished("d"), sample_index=1)
    whole: list[Answer] = []
    events = [STARTED, PromptLogprobs(1, (some, some)), second, first, second, end, finished("c")]
    answers = await collect_samples(stream(events), 2, on_answer=whole.append)
    assert [answer.text for answer in answers] == ["ac", "bbd"]
    assert [answer.text for answer in whole] == ["bbd", "ac"]
    assert (answers[0].logprobs, answers[0].prompt_logprobs) == ((some,), (some, some))
    assert (answers[1].logprobs, answers[1].prompt_logprobs) == ((), ())


async def test_a_sample_that_nobody_asked_for_or_that_does_not_end_is_an_error() -> None:
    unasked = dataclasses.replace(delta(["b"], 0, NextTokenKind.PLAIN), sample_index=1)
    with pytest.raises(MalformedRequestError):
        await collect(stream([STARTED, unasked, finished()]))
    with pytest.raises(MalformedRequestError):
        await collect_samples(stream([STARTED, finished()]), 2)
