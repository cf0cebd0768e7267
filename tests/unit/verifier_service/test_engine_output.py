"""Contract L1 to L4 at the engine: drafts change speed, never a token."""

import random
from collections.abc import Sequence

import pytest

from specdec.ids import DraftSequence
from specdec.messages import Commit, Verdict
from specdec.params import AcceptanceRule, FinishReason, SamplingParams, StopCriteria
from tests.unit.verifier_service.harness import (
    VOCABULARY_SIZE,
    Bench,
    Drafter,
    Session,
    greedy_token_ids,
)

PROMPT = (5, 6, 7)
SAMPLED = SamplingParams(temperature=0.9, top_k=12, frequency_penalty=0.7, repetition_penalty=1.2, seed=11)


def target_only(
    sampling: SamplingParams | None = None, stop: StopCriteria | None = None, prompt: Sequence[int] = PROMPT
):
    bench = Bench()
    session = bench.open(prompt, sampling=sampling, stop=stop)
    bench.run(session)
    return session


def run_with_drafts(session: Session, drafter: Drafter, guess, *, max_steps: int = 500) -> None:
    """Plays a drafter that sends `guess(output so far)` at every position until the session has finished."""
    bench = session.bench
    for _ in range(max_steps):
        if session.finished:
            return
        token_ids = guess(session.token_ids)
        drafter.draft(session, **(token_ids if isinstance(token_ids, dict) else {"token_ids": token_ids}))
        bench.step()
    raise TimeoutError("the session did not finish")


def oracle(reference: Sequence[int], length: int):
    return lambda output: list(reference[len(output) : len(output) + length])


def adversary(reference: Sequence[int], length: int):
    def guess(output: Sequence[int]) -> list[int]:
        right = list(reference[len(output) : len(output) + length])
        return [(token_id + 1) % VOCABULARY_SIZE for token_id in right]

    return guess


def half_right(reference: Sequence[int], length: int):
    generator = random.Random(3)

    def guess(output: Sequence[int]) -> list[int]:
        right = list(reference[len(output) : len(output) + length])
        return [token_id if generator.random() < 0.7 else (token_id + 5) % VOCABULARY_SIZE for token_id in right]

    return guess


def test_target_only_output_is_the_argmax_at_every_position():
    session = target_only()
    assert session.token_ids == greedy_token_ids(PROMPT, 12)
    assert session.finished.reason in (FinishReason.LENGTH, FinishReason.STOP_TOKEN)


@pytest.mark.parametrize("play", [oracle, adversary, half_right])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED])
def test_output_with_any_drafter_is_the_target_only_output(play, sampling):
    expected = target_only(sampling).token_ids
    bench, drafter = Bench(), Drafter(None)
    drafter.bench = bench
    session = bench.open(PROMPT, sampling=sampling)
    drafter.attach(session)
    run_with_drafts(session, drafter, play(expected, 4))
    assert session.token_ids == expected


def test_a_perfect_drafter_saves_forwards_and_a_wrong_one_costs_none():
    expected = target_only().token_ids
    num_forwards = {}
    for play in (oracle, adversary):
        bench = Bench()
        drafter = Drafter(bench)
        session = bench.open(PROMPT)
        drafter.attach(session)
        run_with_drafts(session, drafter, play(expected, 4))
        num_forwards[play] = bench.runner.num_forwards
    assert num_forwards[oracle] < len(expected)
    assert num_forwards[adversary] == len(expected)


@pytest.mark.parametrize("rule", [AcceptanceRule.ONE_HOT, AcceptanceRule.COUPLED])
def test_every_rule_reports_a_length_that_adds_up(rule):
    bench = Bench()
    drafter = Drafter(bench)
    session = bench.open(PROMPT, sampling=SamplingParams(temperature=1.0, seed=5, acceptance_rule=rule))
    drafter.attach(session)
    run_with_drafts(session, drafter, lambda output: [1, 2, 3])
    length = len(PROMPT)
    for commit in session.of(Commit):
        assert commit.base_position == length
        length += len(commit.token_ids)
        has_next = commit.statistics.next_token_kind is not None
        assert len(commit.token_ids) == commit.statistics.num_accepted_tokens + has_next


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_output_is_never_cut_below_or_past_its_limit_wherever_the_draft_ends(max_new_tokens):
    stop = StopCriteria(max_new_tokens=max_new_tokens, ignore_end_of_sequence=True)
    expected = target_only(stop=stop).token_ids
    bench = Bench()
    drafter = Drafter(bench)
    session = bench.open(PROMPT, stop=stop)
    drafter.attach(session)
    run_with_drafts(session, drafter, oracle([*expected, 1, 1, 1, 1, 1], 5))
    assert session.token_ids == expected
    assert len(expected) == max_new_tokens
    assert session.finished.reason is FinishReason.LENGTH
    assert session.finished.usage.num_output_tokens == max_new_tokens


@pytest.mark.parametrize("end_index", [0, 2, 5])
def test_nothing_after_an_end_token_in_the_middle_of_a_draft_is_committed_or_counted(end_index):
    whole = greedy_token_ids(PROMPT, 12)
    stop = StopCriteria(max_new_tokens=12, stop_token_ids=(whole[end_index],))
    expected = whole[: whole.index(whole[end_index]) + 1]
    bench = Bench()
    drafter = Drafter(bench)
    session = bench.open(PROMPT, stop=stop)
    drafter.attach(session)
    run_with_drafts(session, drafter, oracle(whole, 8))
    assert session.token_ids == expected
    assert session.finished.reason is FinishReason.STOP_TOKEN
    assert session.finished.usage.num_output_tokens == len(expected)
    accepted = sum(commit.statistics.num_accepted_tokens for commit in session.of(Commit))
    assert session.finished.speculative.num_accepted_tokens == accepted
    assert session.of(Commit)[-1].token_texts[-1] == ""


@pytest.mark.parametrize("draft_length", [0, 1, 3, 8])
def test_a_stop_string_ends_the_output_at_the_same_token_with_drafts_of_any_length(draft_length):
    stop_free = StopCriteria(max_new_tokens=12, ignore_end_of_sequence=True)
    plain = target_only(stop=stop_free)
    stop = StopCriteria(max_new_tokens=12, ignore_end_of_sequence=True, stop_strings=(plain.text[4:6],))
    expected = target_only(stop=stop)
    bench = Bench()
    drafter = Drafter(bench)
    session = bench.open(PROMPT, stop=stop)
    drafter.attach(session)
    run_with_drafts(session, drafter, oracle(plain.token_ids, draft_length))
    assert session.token_ids == expected.token_ids
    assert session.text == expected.text == plain.text[: plain.text.index(plain.text[4:6])]
    assert session.finished.reason is FinishReason.STOP_STRING


def test_three_sessions_in_one_forward_that_accept_none_some_and_all_keep_their_own_output():
    prompts = ((5, 6, 7), (1, 2, 3, 4), (9,))
    expected = [greedy_token_ids(prompt, 12) for prompt in prompts]
    bench = Bench()
    drafter = Drafter(bench)
    sessions = [bench.open(prompt, session_id=f"s{i}") for i, prompt in enumerate(prompts)]
    for session in sessions:
        drafter.attach(session)
    plays = [adversary(expected[0], 4), half_right(expected[1], 4), oracle(expected[2], 4)]
    for _ in range(40):
        for session, play in zip(sessions, plays, strict=True):
            if not session.finished:
                drafter.draft(session, play(session.token_ids))
        bench.step()
    assert [session.token_ids for session in sessions] == expected


def test_a_long_prompt_is_prefilled_in_chunks_while_another_session_goes_on():
    bench = Bench(max_step_rows=8)
    short = bench.open((5,), session_id="short", stop=StopCriteria(max_new_tokens=12, ignore_end_of_sequence=True))
    bench.step()
    long_prompt = tuple(1 + i % 20 for i in range(60))
    long = bench.open(long_prompt, session_id="long")
    before = len(short.token_ids)
    for _ in range(5):
        bench.step()
    assert len(short.token_ids) == before + 5
    assert not long.token_ids
    bench.run(short, long)
    assert long.token_ids == greedy_token_ids(long_prompt, 12)


def test_a_tree_is_verified_along_the_targets_own_path():
    expected = target_only().token_ids
    bench = Bench()
    drafter = Drafter(bench)
    session = bench.open(PROMPT)
    drafter.attach(session)

    def tree(output: Sequence[int]) -> dict:
        right = list(expected[len(output) : len(output) + 2])
        if len(right) < 2:
            return {"token_ids": right}
        wrong = [(token_id + 1) % VOCABULARY_SIZE for token_id in right]
        return {"token_ids": [wrong[0], right[0], wrong[1], right[1]], "parent_indices": (-1, -1, 1, 1)}

    run_with_drafts(session, drafter, tree)
    assert session.token_ids == expected
    verdicts = [message for message in drafter.messages if isinstance(message, Verdict)]
    assert any(tuple(verdict.accepted_node_indices) == (1, 3) for verdict in verdicts)


def test_a_resumed_session_continues_where_its_tokens_end():
    for sampling in (SamplingParams(temperature=0.0), SAMPLED):
        expected = target_only(sampling)
        for num_committed in (1, 4, 11):
            bench = Bench()
            session = bench.open(
                PROMPT, epoch=2, sampling=sampling, committed=(*PROMPT, *expected.token_ids[:num_committed])
            )
            bench.run(session)
            assert session.token_ids == expected.token_ids[num_committed:]


def test_a_session_resumed_at_its_end_finishes_at_once():
    expected = target_only()
    bench = Bench()
    session = bench.open(PROMPT, epoch=2, committed=(*PROMPT, *expected.token_ids))
    assert session.finished.reason is expected.finished.reason
    assert session.token_ids == []


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_of_drafts_keeps_the_output_and_answers_each_draft_exactly_once(seed):
    """Drafts early, late, stale, duplicate, superseded, too long, wrong, empty; replaced drafters; broken streams."""
    generator = random.Random(seed)
    sampling = generator.choice([SamplingParams(temperature=0.0), SAMPLED])
    prompts = [tuple(generator.randrange(1, 20) for _ in range(generator.randrange(1, 6))) for _ in range(3)]
    expected = [target_only(sampling, prompt=prompt).token_ids for prompt in prompts]
    bench = Bench(max_step_rows=generator.choice([4, 16, 64]))
    sessions = [bench.open(prompt, session_id=f"s{i}", sampling=sampling) for i, prompt in enumerate(prompts)]
    drafters = [Drafter(bench) for _ in range(2)]
    sent: list[list[int]] = [[], []]
    attached: dict[str, tuple[int, int]] = {}
    for _ in range(400):
        if all(session.finished for session in sessions):
            break
        index = generator.randrange(3)
        session = sessions[index]
        if not session.finished and generator.random() < 0.1:
            which = generator.randrange(2)
            _, last = attached.get(session.session_id, (0, 0))
            drafters[which].attach(session, last + 1)
            attached[session.session_id] = (which, last + 1)
        if session.session_id in attached and generator.random() < 0.8:
            which, attachment_id = attached[session.session_id]
            shift = generator.choice([0, 0, 0, 0, -1, -2, 1])
            at = max(0, len(session.token_ids) + shift)
            guess = list(expected[index][at : at + generator.randrange(0, 7)])
            if generator.random() < 0.4:
                guess = [(token_id + 3) % VOCABULARY_SIZE for token_id in guess]
            changes = {"epoch": session.epoch + 1} if generator.random() < 0.05 else {}
            if generator.random() < 0.05:
                changes["draft_sequence"] = DraftSequence(0)
            attachment = generator.choice([attachment_id] * 8 + [max(1, attachment_id - 1)])
            sequence = drafters[which].draft(session, guess, len(prompts[index]) + at, attachment, **changes)
            sent[which].append(changes.get("draft_sequence", sequence))
        if generator.random() < 0.02:
            which = generator.randrange(2)
            bench.engine.drafters.stream_broken(drafters[which].stream)
        if generator.random() < 0.6:
            wake_at = bench.step()
            bench.now = max(bench.now + 0.01, wake_at or 0.0)
    assert [session.token_ids for session in sessions] == expected
    for drafter, sequences in zip(drafters, sent, strict=True):
        answers = drafter.answers()
        assert {sequence: len(messages) for sequence, messages in answers.items()} == {
            sequence: sequences.count(sequence) for sequence in sequences
        }
