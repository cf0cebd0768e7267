"""Who has rows in a step: running sessions always, short prompts soon, long ones steadily, tenants by their share."""

import itertools
import random

from specdec.messages import Commit
from specdec.params import SpeculationOptions, StopCriteria
from tests.unit.verifier_service.harness import Bench, Drafter, HashRunner, Session, greedy_token_ids

ENDLESS = StopCriteria(max_new_tokens=400, ignore_end_of_sequence=True)


def prompt_of(num_tokens: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(1, 20) for _ in range(num_tokens))


def long_bench(**options) -> Bench:
    return Bench(
        runner=HashRunner(num_blocks=1000, context_limit=4500), max_waiting_sessions=200, max_sessions=200, **options
    )


def steps_to_first_token(bench: Bench, session: Session) -> int:
    for num_steps in itertools.count():
        if session.token_ids:
            return num_steps
        bench.step()
    raise AssertionError


def test_a_short_request_waits_at_most_two_steps_more_while_a_long_prompt_is_computed():
    for num_tokens in (3, 40, 100, 190):
        idle = steps_to_first_token(bench := long_bench(max_step_rows=64), bench.open(prompt_of(num_tokens, 1)))
        bench = long_bench(max_step_rows=64)
        bench.open(prompt_of(4000, 0), session_id="long")
        for _ in range(3):
            bench.step()
        short = bench.open(prompt_of(num_tokens, 1), session_id="short")
        assert steps_to_first_token(bench, short) <= idle + 2


def test_a_long_prompt_advances_in_every_step_however_many_short_ones_come():
    bench = long_bench(max_step_rows=64)
    bench.open(prompt_of(1500, 0), session_id="long")
    cache = bench.runner.caches[0]
    for step in range(60):
        for index in range(3):
            bench.open(prompt_of(40, 10 * step + index + 1), session_id=f"s{step}-{index}")
        before = cache.length
        bench.step()
        assert cache.length >= before + 8 or bench.runner.num_forwards < 1
        if cache.length >= 1500:
            break


def test_running_sessions_commit_in_every_step_of_a_prefill():
    bench = long_bench(max_step_rows=32)
    running = [bench.open((1 + index,), session_id=f"r{index}", stop=ENDLESS) for index in range(4)]
    bench.step()
    bench.open(prompt_of(900, 0), session_id="long")
    before = [len(session.token_ids) for session in running]
    for _ in range(20):
        bench.step()
    assert [len(session.token_ids) for session in running] == [count + 20 for count in before]


def test_a_closed_session_has_no_rows_in_the_next_step():
    bench = long_bench(max_step_rows=32)
    staying = bench.open((3,), session_id="staying", stop=ENDLESS)
    leaving = bench.open(prompt_of(900, 0), session_id="leaving")
    bench.step()
    bench.close(leaving)
    bench.step()
    assert bench.runner.num_rows[-1] == 1
    assert staying.of(Commit)


def test_a_tenant_with_many_sessions_leaves_another_its_rows():
    """Sixteen rows a step; the crowd alone would want forty, and the single one gets its own in every step."""
    bench = long_bench(max_step_rows=16)
    for index in range(40):
        bench.open((1 + index % 15,), session_id=f"crowd{index}", tenant="crowd", stop=ENDLESS)
    for _ in range(10):
        bench.step()
    single = bench.open((9,), session_id="single", tenant="single", stop=ENDLESS)
    for _ in range(30):
        bench.step()
    assert len(single.token_ids) >= 28


def test_sessions_of_one_tenant_take_turns():
    bench = long_bench(max_step_rows=8)
    sessions = [bench.open((1 + index % 15,), session_id=f"s{index}", stop=ENDLESS) for index in range(20)]
    for _ in range(100):
        bench.step()
    counts = [len(session.token_ids) for session in sessions]
    assert max(counts) - min(counts) <= 2


def test_prompts_of_a_tenant_with_many_do_not_hold_up_another_tenants():
    bench = long_bench(max_step_rows=32)
    for index in range(20):
        bench.open(prompt_of(150, index), session_id=f"crowd{index}", tenant="crowd")
    for _ in range(5):
        bench.step()
    single = bench.open(prompt_of(60, 99), session_id="single", tenant="single")
    assert steps_to_first_token(bench, single) <= 4


def test_the_queue_is_fair_between_tenants():
    bench = Bench(max_sessions=2, max_waiting_sessions=100)
    stop = StopCriteria(max_new_tokens=6, ignore_end_of_sequence=True)
    for index in range(30):
        bench.open((1 + index % 15, 4), session_id=f"crowd{index}", tenant="crowd", stop=stop)
    for _ in range(4):
        bench.step()
    single = bench.open((9,), session_id="single", tenant="single", stop=stop)
    for _ in range(12):
        bench.step()
    assert single.finished


def test_a_session_whose_draft_has_not_come_holds_up_nobody_and_is_left_out_of_no_forward():
    bench = Bench()
    waiting = bench.open((5, 6, 7), session_id="waiting", stop=StopCriteria(max_new_tokens=100))
    drafter = Drafter(bench)
    drafter.attach(waiting)
    bench.step()
    drafter.draft(waiting, [1])
    bench.step()
    other = bench.open((3,), session_id="other", stop=StopCriteria(max_new_tokens=6, ignore_end_of_sequence=True))
    num_waiting_tokens = len(waiting.token_ids)
    for _ in range(6):
        bench.step()
    assert len(other.token_ids) == 6
    assert len(waiting.token_ids) == num_waiting_tokens + 6
    deadline = bench.step()
    assert deadline is not None and deadline > bench.now  # noqa: PT018 - it sleeps, it does not spin


def test_a_session_without_a_budget_never_waits_for_a_draft():
    bench = Bench()
    session = bench.open((5, 6, 7), speculation=SpeculationOptions(max_draft_tokens=0))
    drafter = Drafter(bench)
    drafter.attach(session)
    bench.step()
    sequence = drafter.draft(session, [1])
    bench.run(session)
    assert bench.now == 0.0
    assert len(drafter.answers()[sequence]) == 1
    assert session.finished.speculative.num_fallback_decodes == 0
    assert session.token_ids == greedy_token_ids((5, 6, 7), 12)
