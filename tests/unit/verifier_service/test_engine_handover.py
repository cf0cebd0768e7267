"""A session that changes its owner: what the next one goes on from."""

import dataclasses

import pytest

from specdec.errors import TokenOutOfVocabularyError
from specdec.messages import Commit, Fenced, PromptLogprobs
from specdec.params import SamplingParams, StopCriteria
from tests.unit.verifier_service.harness import END_TOKEN_ID, Bench, Drafter, Session, greedy_token_ids

PROMPT = (5, 6, 7)
OUTPUT = greedy_token_ids(PROMPT, 12)
RULES = [SamplingParams(temperature=0.0), SamplingParams(seed=3)]


def abandoned(bench: Bench, num_tokens: int = 5, **changes: object) -> Session:
    """A session of epoch 1 whose owner's stream breaks after so many tokens."""
    session = bench.open(PROMPT, **changes)
    while len(session.token_ids) < num_tokens:
        bench.step()
    bench.close(session)
    return session


def kept_of(session: Session) -> list[int]:
    return list(session.opened.kept_token_ids)


@pytest.mark.parametrize("sampling", RULES)
@pytest.mark.parametrize("num_received", [0, 2, 5])
def test_the_next_owner_goes_on_from_what_the_broken_stream_had_decided(sampling, num_received):
    bench = Bench()
    undisturbed = bench.open(PROMPT, session_id="undisturbed", sampling=sampling)
    bench.run(undisturbed)
    old = abandoned(bench, sampling=sampling)
    received = old.token_ids[:num_received]
    committed = (*PROMPT, *received) if received else ()
    new = bench.open(PROMPT, epoch=2, committed=committed, sampling=sampling)
    assert kept_of(new) == old.token_ids[num_received:]
    assert new.opened.kept_epoch == (1 if kept_of(new) else 0)
    bench.run(new)
    assert [*received, *kept_of(new), *new.token_ids] == undisturbed.token_ids
    assert new.finished.usage.num_output_tokens == len(undisturbed.token_ids)
    assert new.of(Commit)[0].base_position == len(PROMPT) + 5
    assert new.of(Commit)[0].round == 1


@pytest.mark.parametrize("sampling", RULES)
@pytest.mark.parametrize("num_received", [1, 4, 5])
def test_an_owner_that_knows_the_output_alone_goes_on_as_one_that_knows_the_prompt_s_tokens(sampling, num_received):
    told = []
    for knows_prompt in (True, False):
        bench = Bench()
        received = abandoned(bench, sampling=sampling).token_ids[:num_received]
        committed = (*PROMPT, *received) if knows_prompt else tuple(received)
        new = bench.open(PROMPT, epoch=2, committed=committed, sampling=sampling, knows_prompt=knows_prompt)
        bench.run(new)
        opened = dataclasses.replace(new.opened, attach_secret=b"")
        told.append((opened, new.of(Commit)[0].base_position, new.token_ids, new.text, new.finished.usage))
    assert told[0] == told[1]
    assert told[1][0].prompt_token_ids == PROMPT
    assert len(told[1][0].kept_token_ids) == 5 - num_received


def test_output_alone_has_its_penalties_its_recorded_tokens_and_its_ends():
    sampling = SamplingParams(temperature=0.0, presence_penalty=1.5)
    undisturbed = Bench()
    whole = undisturbed.open(PROMPT, sampling=sampling)
    undisturbed.run(whole)
    bench = Bench()
    new = bench.open(
        PROMPT,
        epoch=2,
        committed=whole.token_ids[:4],
        sampling=sampling,
        recorded=whole.token_ids[4:6],
        recorded_epoch=1,
        num_prompt_logprobs=0,
        knows_prompt=False,
    )
    assert kept_of(new) == whole.token_ids[4:6]
    bench.run(new)
    assert [*whole.token_ids[:6], *new.token_ids] == whole.token_ids
    assert new.of(PromptLogprobs) == []
    ended = bench.open(PROMPT, epoch=3, committed=whole.token_ids, sampling=sampling, knows_prompt=False)
    assert (ended.token_ids, ended.finished.usage.num_output_tokens) == ([], len(whole.token_ids))


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_output_alone_is_checked_like_a_prompt(bad):
    refused = Bench().open(PROMPT, epoch=2, committed=(OUTPUT[0], bad), knows_prompt=False)
    assert [type(event) for event in refused.events] == [TokenOutOfVocabularyError]


def test_text_of_kept_tokens_comes_with_the_next_commit():
    bench = Bench()
    undisturbed = bench.open(PROMPT, session_id="undisturbed")
    bench.run(undisturbed)
    abandoned(bench)
    new = bench.open(PROMPT, epoch=2, committed=(*PROMPT, *OUTPUT[:2]))
    bench.run(new)
    told = "".join(commit.text for commit in undisturbed.of(Commit)[:2])
    assert told + new.text == undisturbed.text
    for commit in new.of(Commit):
        assert not commit.token_texts or "".join(commit.token_texts) == commit.text


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "another"},
        {"prompt": (5, 6, 8)},
        {"sample_index": 1},
        {"sampling": SamplingParams(temperature=0.0, presence_penalty=1.0)},
        {"committed": (*PROMPT, OUTPUT[0], 1 + OUTPUT[1])},
        {"num_logprobs": 1},
        {"num_prompt_logprobs": 1},
    ],
)
def test_kept_tokens_of_anything_else_and_those_that_conflict_are_not_used_and_are_gone(changes):
    bench = Bench()
    abandoned(bench)
    new = bench.open(**{"prompt": PROMPT, "epoch": 2, **changes})
    assert kept_of(new) == []
    assert bench.engine.handover.num_kept == 0


def test_nothing_is_kept_of_a_session_that_told_log_probabilities():
    bench = Bench()
    abandoned(bench, num_logprobs=0)
    assert bench.engine.handover.num_kept == 0


def test_kept_tokens_are_freed_by_time_alone_and_hold_no_block():
    bench = Bench(prefix_caching=False, kept_tokens_grace_s=30.0)
    abandoned(bench)
    assert bench.engine.load().kv_used_bytes == 0
    bench.now += 29.0
    bench.step()
    assert bench.engine.handover.num_kept == 1
    bench.now += 1.0
    bench.step()
    assert bench.engine.handover.num_kept == 0
    assert kept_of(bench.open(PROMPT, epoch=2)) == []


def test_an_owner_that_still_seems_to_be_there_is_fenced_and_its_tokens_are_gone_on_from():
    bench = Bench()
    old = bench.open(PROMPT)
    while len(old.token_ids) < 4:
        bench.step()
    new = bench.open(PROMPT, epoch=2, nonce=b"m" * 16, committed=(*PROMPT, *OUTPUT[:1]))
    assert old.events[-1] == Fenced(2)
    assert kept_of(new) == OUTPUT[1:4]
    bench.close(old)
    bench.run(new)
    assert [*OUTPUT[:4], *new.token_ids] == OUTPUT
    assert old.token_ids == OUTPUT[:4]


def test_a_new_owner_that_is_turned_away_leaves_what_is_kept():
    bench = Bench(max_sessions=1, max_waiting_sessions=0)
    abandoned(bench)
    other = bench.open(PROMPT, session_id="other")
    bench.open(PROMPT, epoch=2)
    bench.close(other)
    assert kept_of(bench.open(PROMPT, epoch=3)) == OUTPUT[:5]


def test_the_record_is_gone_on_from_where_its_epoch_is_higher_and_kept_tokens_where_theirs_is():
    for recorded_epoch, expected in ((2, OUTPUT[:1]), (1, OUTPUT[:5])):
        bench = Bench()
        abandoned(bench)
        new = bench.open(PROMPT, epoch=3, recorded=OUTPUT[:1], recorded_epoch=recorded_epoch)
        assert kept_of(new) == expected
        assert new.opened.kept_epoch == recorded_epoch
        bench.run(new)
        assert [*expected, *new.token_ids] == OUTPUT


def test_a_session_goes_on_from_the_record_where_nothing_is_kept():
    bench = Bench(kept_tokens_grace_s=0.0)
    abandoned(bench)
    new = bench.open(PROMPT, epoch=2, recorded=OUTPUT[:3], recorded_epoch=1)
    assert kept_of(new) == OUTPUT[:3]
    bench.run(new)
    assert [*OUTPUT[:3], *new.token_ids] == OUTPUT


@pytest.mark.parametrize(
    ("stop", "recorded", "kept", "reason"),
    [
        (StopCriteria(max_new_tokens=2), (1, 2, 3), (1, 2), "LENGTH"),
        (StopCriteria(max_new_tokens=9), (1, END_TOKEN_ID, 3), (1, END_TOKEN_ID), "STOP_TOKEN"),
        (StopCriteria(max_new_tokens=9, stop_token_ids=(2,)), (1, 2, 3), (1, 2), "STOP_TOKEN"),
        (StopCriteria(max_new_tokens=9, stop_strings=("bc",)), (1, 2, 3, 4), (1, 2, 3), "STOP_STRING"),
    ],
)
def test_an_end_that_falls_into_tokens_of_an_earlier_epoch_ends_the_output_there(stop, recorded, kept, reason):
    bench = Bench()
    session = bench.open(PROMPT, epoch=2, stop=stop, recorded=recorded, recorded_epoch=1)
    assert kept_of(session) == list(kept)
    assert session.finished.reason.value == reason
    assert session.finished.usage.num_output_tokens == len(kept)
    assert session.text == {"LENGTH": "ab", "STOP_TOKEN": "a", "STOP_STRING": "a"}[reason]
    assert bench.engine.load().num_active_sessions == 0


def test_a_stop_string_may_begin_in_received_tokens_and_end_in_kept_ones():
    bench = Bench()
    stop = StopCriteria(max_new_tokens=9, stop_strings=("abc",))
    session = bench.open(PROMPT, epoch=2, stop=stop, committed=(*PROMPT, 1), recorded=(2, 3, 4), recorded_epoch=1)
    assert kept_of(session) == [2, 3]
    assert (session.finished.reason.value, session.text) == ("STOP_STRING", "")


def test_penalties_and_the_minimum_length_count_kept_tokens():
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5, min_tokens=8)
    bench = Bench()
    undisturbed = bench.open(PROMPT, session_id="undisturbed", sampling=sampling)
    bench.run(undisturbed)
    recorded = undisturbed.token_ids[:6]
    new = bench.open(PROMPT, epoch=2, sampling=sampling, recorded=recorded, recorded_epoch=1)
    bench.run(new)
    assert [*kept_of(new), *new.token_ids] == undisturbed.token_ids


def test_a_drafter_of_the_next_owner_is_told_kept_tokens_as_committed():
    bench = Bench()
    abandoned(bench)
    new = bench.open(PROMPT, epoch=2)
    drafter = Drafter(bench)
    drafter.attach(new)
    assert list(drafter.messages[0].committed_token_ids) == [*PROMPT, *OUTPUT[:5]]
    drafter.draft(new, OUTPUT[5:8], start_position=len(PROMPT) + 5)
    bench.run(new)
    assert [*OUTPUT[:5], *new.token_ids] == OUTPUT
