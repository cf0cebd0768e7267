"""Blocks of the cache: who gets them, shares them and gives them back, and what the output makes of it: nothing."""

import random

import pytest

from specdec.errors import SpecdecError
from specdec.messages import Attached, BudgetUpdate, Commit, Verdict
from specdec.params import SamplingParams, StopCriteria
from tests.unit.verifier_service.harness import Bench, Drafter, HashRunner, Session, greedy_token_ids

PROMPT = (5, 6, 7)
ENDLESS = StopCriteria(max_new_tokens=40, ignore_end_of_sequence=True)


def long_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 20) for _ in range(num_tokens))


def endless_token_ids(prompt, num_tokens: int) -> list[int]:
    bench = Bench()
    session = bench.open(prompt, stop=StopCriteria(max_new_tokens=num_tokens, ignore_end_of_sequence=True))
    bench.run(session)
    return session.token_ids


def rows_to_first_token(bench: Bench, session: Session) -> int:
    before = sum(bench.runner.num_rows)
    while not session.token_ids:
        bench.step()
    return sum(bench.runner.num_rows) - before


# --- Shared prefixes -------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_computed_before_is_found_in_the_cache():
    bench = Bench()
    prompt = long_prompt(50)
    first = bench.open(prompt, session_id="first")
    assert rows_to_first_token(bench, first) == 50
    bench.run(first)
    second = bench.open(prompt, session_id="second")
    assert rows_to_first_token(bench, second) == 50 - 48
    bench.run(second)
    assert first.token_ids == second.token_ids
    assert first.finished.usage.num_cached_prompt_tokens == 0
    assert second.finished.usage.num_cached_prompt_tokens == 48


def test_a_conversation_goes_on_where_its_last_turn_ended():
    bench = Bench()
    first = bench.open(PROMPT, session_id="first", stop=ENDLESS)
    bench.run(first)
    second = bench.open((*PROMPT, *first.token_ids, 3), session_id="second")
    bench.run(second)
    assert second.finished.usage.num_cached_prompt_tokens == 32


def test_nothing_is_shared_between_tenants_or_where_sharing_is_off():
    for bench, tenants in ((Bench(), ("one", "other")), (Bench(prefix_caching=False), ("one", "one"))):
        sessions = [bench.open(long_prompt(50), session_id=f"s{i}", tenant=tenants[i]) for i in range(2)]
        bench.run(*sessions)
        assert [session.finished.usage.num_cached_prompt_tokens for session in sessions] == [0, 0]


def test_prompts_that_begin_alike_and_come_at_once_are_computed_once():
    bench = Bench(max_step_rows=16, max_waiting_sessions=16)
    start = long_prompt(64)
    prompts = [(*start, 1 + index) for index in range(5)]
    sessions = [bench.open(prompt, session_id=f"s{index}") for index, prompt in enumerate(prompts)]
    assert bench.engine.load().num_waiting_sessions == 4
    bench.run(*sessions)
    assert [session.token_ids for session in sessions] == [greedy_token_ids(prompt, 12) for prompt in prompts]
    assert [session.finished.usage.num_cached_prompt_tokens for session in sessions] == [0, 64, 64, 64, 64]
    num_outputs = sum(len(session.token_ids) for session in sessions)
    assert sum(bench.runner.num_rows) <= 64 + len(prompts) + num_outputs


def test_a_session_that_waits_for_anothers_prompt_goes_on_alone_when_that_one_ends():
    bench = Bench(max_step_rows=8, max_waiting_sessions=16)
    prompt = long_prompt(100)
    leader, follower = (bench.open(prompt, session_id=name) for name in ("leader", "follower"))
    bench.step()
    assert bench.engine.load().num_waiting_sessions == 1
    bench.close(leader)
    assert bench.engine.load().num_waiting_sessions == 0
    bench.run(follower)
    assert follower.token_ids == greedy_token_ids(prompt, 12)


def test_a_session_that_waits_for_anothers_prompt_holds_up_nobody_behind_it():
    bench = Bench(max_step_rows=8, max_waiting_sessions=16)
    prompt = long_prompt(100)
    leader, follower = (bench.open(prompt, session_id=name) for name in ("leader", "follower"))
    bench.open(PROMPT, session_id="other")
    assert bench.engine.load().num_active_sessions == 2
    bench.run(leader, follower)
    assert leader.token_ids == follower.token_ids


def test_a_prompt_waits_only_for_what_it_has_in_common():
    bench = Bench(max_step_rows=16, max_waiting_sessions=16)
    start = long_prompt(32)
    leader = bench.open((*start, *long_prompt(80, seed=1)), session_id="leader")
    follower = bench.open((*start, *long_prompt(10, seed=2)), session_id="follower")
    bench.step()
    bench.step()
    assert bench.engine.load().num_waiting_sessions == 0  # though the leader's prompt is far from computed
    assert not leader.token_ids
    bench.run(follower)
    assert follower.finished.usage.num_cached_prompt_tokens == 32


# --- Admission -------------------------------------------------------------------------------------------------------


def test_sessions_are_admitted_by_the_blocks_that_they_need():
    bench = Bench(runner=HashRunner(num_blocks=8), max_waiting_sessions=16)
    big = bench.open(long_prompt(90, seed=1), session_id="big", stop=StopCriteria(max_new_tokens=4))
    late = bench.open(long_prompt(50, seed=2), session_id="late")
    assert bench.engine.load().num_waiting_sessions == 1
    bench.run(big, late)
    assert late.token_ids == greedy_token_ids(long_prompt(50, seed=2), 12)


def test_room_is_left_for_running_sessions_to_grow():
    bench = Bench(runner=HashRunner(num_blocks=10), max_waiting_sessions=16)
    for index in range(8):
        bench.open(long_prompt(15, seed=index), session_id=f"s{index}", stop=ENDLESS)
    load = bench.engine.load()
    assert load.num_active_sessions == 5  # each holds one block, and may want another of the five that are left
    assert load.num_waiting_sessions == 3


@pytest.mark.parametrize(
    ("prompt_length", "max_new_tokens", "reason"), [(64, 1, "PROMPT_TOO_LONG"), (40, 30, "INVALID_PARAMETER")]
)
def test_a_request_that_could_never_fit_the_cache_is_refused_at_open(prompt_length, max_new_tokens, reason):
    bench = Bench(runner=HashRunner(num_blocks=4))
    session = bench.open(long_prompt(prompt_length), stop=StopCriteria(max_new_tokens=max_new_tokens))
    (error,) = session.of(SpecdecError)
    assert error.reason == reason
    assert "cache" in error.message


def test_an_output_without_a_limit_is_limited_by_the_cache():
    bench = Bench(runner=HashRunner(num_blocks=4))
    session = bench.open(long_prompt(40), stop=StopCriteria(ignore_end_of_sequence=True))
    assert session.opened.max_new_tokens == 24
    bench.run(session)
    assert len(session.token_ids) == 24


def test_who_is_turned_away_is_told_to_come_later_the_slower_the_queue_drains():
    waits = []
    for seconds_per_step in (0.01, 2.0):
        bench = Bench(max_sessions=1, max_waiting_sessions=30)
        stop = StopCriteria(max_new_tokens=2, ignore_end_of_sequence=True)
        for index in range(31):
            bench.open((1 + index % 15,), session_id=f"s{index}", stop=stop)
        for index in range(40):
            bench.step()
            bench.now += seconds_per_step
            bench.open((1 + index % 15,), session_id=f"more{index}", stop=stop)
        refused = bench.open(PROMPT, session_id="refused")
        for index in range(40):
            if refused.of(SpecdecError):
                break
            refused = bench.open(PROMPT, session_id=f"refused{index}")
        waits.append(refused.of(SpecdecError)[0].retry_after_s)
    assert 0.5 <= waits[0] < waits[1] <= 60


# --- Preemption ------------------------------------------------------------------------------------------------------


def test_sessions_that_outgrow_the_cache_are_computed_again_and_their_output_is_the_same():
    prompts = [long_prompt(14, seed=index) for index in range(5)]
    bench = Bench(runner=HashRunner(num_blocks=11), max_waiting_sessions=16)
    sessions = [bench.open(prompt, session_id=f"s{index}", stop=ENDLESS) for index, prompt in enumerate(prompts)]
    for _ in range(1000):
        if all(session.finished for session in sessions):
            break
        bench.step()
        bench.engine.check_cache()
    assert bench.observer.num_preemptions > 0
    assert [session.token_ids for session in sessions] == [endless_token_ids(prompt, 40) for prompt in prompts]
    assert bench.runner.pool.num_free_blocks == 11
    for session in sessions:
        rounds = [commit.round for commit in session.of(Commit)]
        assert rounds == list(range(1, len(rounds) + 1))


def test_the_eldest_session_is_never_preempted():
    bench = Bench(runner=HashRunner(num_blocks=8), max_waiting_sessions=16)
    eldest = bench.open(long_prompt(20, seed=1), session_id="eldest", stop=ENDLESS)
    others = [bench.open(long_prompt(20, seed=index), session_id=f"s{index}", stop=ENDLESS) for index in range(2, 5)]
    for _ in range(39):
        bench.step()
    assert len(eldest.token_ids) >= 39
    bench.run(eldest, *others, max_steps=2000)


def test_a_preempted_sessions_drafter_is_told_to_stop_and_to_go_on_and_its_draft_is_answered_once():
    bench = Bench(runner=HashRunner(num_blocks=6), max_waiting_sessions=16)
    eldest = bench.open(long_prompt(30, seed=1), session_id="eldest", stop=ENDLESS)
    prompt = long_prompt(30, seed=2)
    expected = endless_token_ids(prompt, 40)
    young = bench.open(prompt, session_id="young", stop=ENDLESS)
    drafter = Drafter(bench)
    drafter.attach(young)
    sent = []
    for _ in range(2000):
        if eldest.finished and young.finished:
            break
        was_active = bench.engine.load().num_waiting_sessions == 0
        if not young.finished and (was_active or not sent):
            at = len(young.token_ids)
            sent.append(drafter.draft(young, expected[at : at + 2]))
        bench.step()
    assert bench.observer.num_preemptions > 0
    assert young.token_ids == expected
    answers = drafter.answers()
    assert all(len(answers[sequence]) == 1 for sequence in sent)
    budgets = [message.draft_budget for message in drafter.messages if isinstance(message, BudgetUpdate)]
    assert budgets[0] == 0
    assert budgets[1] > 0
    assert any(isinstance(answer, Verdict) for (answer,) in answers.values())


def test_a_guess_displaces_nobody():
    bench = Bench(runner=HashRunner(num_blocks=4))
    prompts = [long_prompt(15, seed=1), long_prompt(28, seed=2)]
    elder, younger = (bench.open(prompt, session_id=f"s{index}") for index, prompt in enumerate(prompts))
    drafter = Drafter(bench)
    drafter.attach(elder)
    bench.step()
    drafter.draft(elder, endless_token_ids(prompts[0], 9)[1:])
    bench.step()
    assert bench.observer.num_preemptions == 0
    bench.run(elder, younger)
    assert [elder.token_ids, younger.token_ids] == [greedy_token_ids(prompt, 12) for prompt in prompts]


def test_a_drafter_of_a_session_that_waits_has_no_budget_until_it_runs():
    bench = Bench(max_sessions=1)
    first = bench.open(PROMPT, session_id="first")
    second = bench.open(PROMPT, session_id="second")
    drafter = Drafter(bench)
    drafter.attach(second)
    (attached,) = drafter.messages
    assert isinstance(attached, Attached)
    assert attached.draft_budget == 0
    bench.run(first)
    assert [message.draft_budget for message in drafter.messages if isinstance(message, BudgetUpdate)] == [8]
    bench.run(second)


def test_sampled_output_is_the_same_through_preemption():
    sampling = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, seed=3)
    expected = []
    for num_blocks in (256, 9):
        bench = Bench(runner=HashRunner(num_blocks=num_blocks), max_waiting_sessions=16)
        sessions = [
            bench.open(long_prompt(20, seed=index), session_id=f"s{index}", sampling=sampling, stop=ENDLESS)
            for index in range(4)
        ]
        bench.run(*sessions, max_steps=2000)
        expected.append([session.token_ids for session in sessions])
    assert bench.observer.num_preemptions > 0
    assert expected[0] == expected[1]


def test_an_idle_engine_finds_blocks_that_were_lost_and_goes_on():
    bench = Bench()
    bench.run(bench.open(PROMPT, session_id="before"))
    bench.step()
    assert bench.observer.num_inconsistencies == 0
    bench.run(bench.open(PROMPT, session_id="leaking"))
    bench.runner.pool.allocate(1)
    bench.step()
    assert bench.observer.num_inconsistencies == 0  # looked for seldom
    bench.now += 60
    bench.step()
    bench.step()
    assert bench.observer.num_inconsistencies == 1
    session = bench.open(PROMPT)
    bench.run(session)
    assert session.token_ids == greedy_token_ids(PROMPT, 12)


def test_the_blocks_that_an_operator_sees_are_those_held_now_also_when_no_forward_follows():
    bench = Bench()
    assert bench.observer.num_blocks == bench.runner.pool.num_blocks
    session = bench.open((5, 6, 7) * 8)
    bench.step()
    assert bench.observer.num_used_blocks == bench.runner.pool.num_used_blocks > 0
    bench.close(session)
    assert bench.observer.num_used_blocks == bench.runner.pool.num_used_blocks == 0
