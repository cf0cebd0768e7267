"""Log-probabilities of prompts and outputs: the same with drafts, in chunks, after a hit and through preemption."""

import itertools
import random
from collections.abc import Sequence

import pytest

from specdec.decoding.rounds import token_logprobs
from specdec.messages import Commit, PositionLogprobs, PromptLogprobs
from specdec.params import SamplingParams, StopCriteria
from tests.unit.verifier_service.harness import (
    NUM_REAL_TOKENS,
    Bench,
    Drafter,
    HashRunner,
    Session,
    greedy_token_ids,
    prefix_logits,
)
from verifier_service.rounds import Rounds

SAMPLED = SamplingParams(temperature=0.9, top_k=12, frequency_penalty=0.7, repetition_penalty=1.2, seed=11)
PROMPT = tuple(random.Random(0).randrange(1, 20) for _ in range(40))


def expected_logprobs(token_ids: Sequence[int], start: int, num_alternatives: int) -> list[PositionLogprobs]:
    return [
        token_logprobs(prefix_logits(token_ids[:at])[None], [token_ids[at]], num_alternatives, NUM_REAL_TOKENS)[0]
        for at in range(start, len(token_ids))
    ]


def output_logprobs(session: Session) -> list[PositionLogprobs]:
    for commit in session.of(Commit):
        assert len(commit.logprobs) == len(commit.token_ids)
    return list(itertools.chain.from_iterable(commit.logprobs for commit in session.of(Commit)))


def prompt_logprobs(session: Session) -> list[PositionLogprobs]:
    position, told = 1, []
    for event in session.of(PromptLogprobs):
        assert event.start_position == position
        position += len(event.logprobs)
        told += event.logprobs
    return told


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED])
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_log_probabilities_of_an_output_are_the_targets_own_with_and_without_drafts(sampling, num_logprobs):
    alone = Bench().open(PROMPT, sampling=sampling, num_logprobs=num_logprobs)
    alone.bench.run(alone)
    assert output_logprobs(alone) == expected_logprobs((*PROMPT, *alone.token_ids), len(PROMPT), num_logprobs)
    bench = Bench()
    drafted = bench.open(PROMPT, sampling=sampling, num_logprobs=num_logprobs)
    drafter = Drafter(bench)
    drafter.attach(drafted)
    generator = random.Random(2)
    while not drafted.finished:
        at = len(drafted.token_ids)
        guess = alone.token_ids[at : at + generator.randrange(6)]
        drafter.draft(drafted, [token_id if generator.random() < 0.8 else 1 for token_id in guess])
        bench.step()
    assert drafted.finished.speculative.num_accepted_tokens > 0
    assert output_logprobs(drafted) == output_logprobs(alone)


def test_an_output_cut_at_its_end_has_as_many_log_probabilities_as_tokens():
    whole = greedy_token_ids(PROMPT, 12)
    stop = StopCriteria(max_new_tokens=12, stop_token_ids=(whole[3],))
    bench = Bench()
    session = bench.open(PROMPT, stop=stop, num_logprobs=1)
    drafter = Drafter(bench)
    drafter.attach(session)
    while not session.token_ids:
        bench.step()
    drafter.draft(session, whole[1:8])
    bench.run(session)
    assert len(output_logprobs(session)) == len(session.token_ids) == whole.index(whole[3]) + 1


def test_nobody_gets_log_probabilities_who_did_not_ask():
    bench = Bench()
    session = bench.open(PROMPT)
    bench.run(session)
    assert not prompt_logprobs(session)
    assert all(not commit.logprobs for commit in session.of(Commit))


@pytest.mark.parametrize("max_step_rows", [5, 64])
def test_log_probabilities_of_a_prompt_are_told_before_its_first_token_whatever_the_chunks(max_step_rows):
    bench = Bench(max_step_rows=max_step_rows)
    bench.run(bench.open(PROMPT, session_id="before"))  # its blocks are in the cache, and of no use here
    other = bench.open((3, 4), session_id="other")
    session = bench.open(PROMPT, num_prompt_logprobs=2)
    bench.run(session, other)
    assert prompt_logprobs(session) == expected_logprobs(PROMPT, 1, 2)
    kinds = [type(event) for event in session.events]
    assert kinds.index(Commit) > max(at for at, kind in enumerate(kinds) if kind is PromptLogprobs)
    assert session.token_ids == greedy_token_ids(PROMPT, 12)
    assert session.finished.usage.num_cached_prompt_tokens == 0


def test_a_prompt_of_one_token_has_no_log_probabilities():
    bench = Bench()
    session = bench.open((5,), num_prompt_logprobs=2)
    bench.run(session)
    assert not session.of(PromptLogprobs)
    assert session.token_ids == greedy_token_ids((5,), 12)


def test_a_session_that_goes_on_elsewhere_tells_no_log_probabilities_of_its_prompt_again():
    bench = Bench()
    expected = greedy_token_ids(PROMPT, 12)
    session = bench.open(PROMPT, epoch=2, committed=(*PROMPT, *expected[:3]), num_prompt_logprobs=1, num_logprobs=1)
    bench.run(session)
    assert not session.of(PromptLogprobs)
    assert output_logprobs(session) == expected_logprobs((*PROMPT, *expected), len(PROMPT) + 3, 1)


def test_preemption_in_the_middle_of_a_scored_prompt_repeats_and_loses_nothing():
    bench = Bench(runner=HashRunner(num_blocks=6), max_step_rows=4, max_waiting_sessions=8)
    stop = StopCriteria(max_new_tokens=40, ignore_end_of_sequence=True)
    eldest = bench.open(tuple(range(1, 16)), session_id="eldest", stop=stop)
    for _ in range(3):
        bench.step()
    scored = bench.open(PROMPT, num_prompt_logprobs=2)
    bench.run(eldest, scored, max_steps=2000)
    assert bench.observer.num_preemptions > 0
    assert prompt_logprobs(scored) == expected_logprobs(PROMPT, 1, 2)
    assert scored.token_ids == greedy_token_ids(PROMPT, 12)


def test_a_sample_has_noise_of_its_own_and_the_first_is_the_seeds():
    outputs = []
    for sample_index in (0, 0, 1, 2):
        bench = Bench()
        session = bench.open(PROMPT, sampling=SamplingParams(temperature=1.5, seed=4), sample_index=sample_index)
        bench.run(session)
        outputs.append(session.token_ids)
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 3


def test_a_prompt_that_cannot_be_scored_shifts_no_other_prompts_rows(monkeypatch):
    alone = Bench().open((4, 5, 6, 7), num_prompt_logprobs=1)
    alone.bench.run(alone)
    bench = Bench()
    score = Rounds.score

    def fails_for_one(self, planned, logits):
        if planned.session.session_id == "bad":
            raise ArithmeticError
        score(self, planned, logits)

    monkeypatch.setattr(Rounds, "score", fails_for_one)
    bench.open((9, 8, 7), session_id="bad", num_prompt_logprobs=1)
    other = bench.open((4, 5, 6, 7), session_id="other", num_prompt_logprobs=1)
    bench.run(other)
    assert other.of(PromptLogprobs) == alone.of(PromptLogprobs)
