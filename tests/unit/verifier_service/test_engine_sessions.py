"""Opening, fencing, admission and the end of sessions at the engine."""

import math

import pytest

from specdec.errors import SpecdecError
from specdec.messages import Draining, Fenced, Opened
from specdec.params import SamplingParams, StopCriteria
from tests.unit.verifier_service.harness import Bench, greedy_token_ids

PROMPT = (5, 6, 7)


def error_of(session) -> str:
    (error,) = session.of(SpecdecError)
    return error.reason


def is_turned_away(session) -> bool:
    return [error.reason for error in session.of(SpecdecError)] == ["OVERLOADED"]


def test_opened_tells_what_an_owner_needs():
    session = Bench().open(PROMPT)
    assert isinstance(session.events[0], Opened)
    assert tuple(session.opened.prompt_token_ids) == PROMPT
    assert len(session.opened.attach_secret) == 32
    assert session.opened.max_new_tokens == 12


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": (24,)}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"prompt": (-1,)}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"prompt": (1,) * 128}, "PROMPT_TOO_LONG"),
        ({"stop": StopCriteria(max_new_tokens=126)}, "INVALID_PARAMETER"),
        ({"sampling": SamplingParams(banned_token_ids=(24,), seed=1)}, "INVALID_PARAMETER"),
        ({"sampling": SamplingParams(temperature=1.0)}, "INVALID_PARAMETER"),
        ({"stop": StopCriteria(stop_token_ids=(99,))}, "INVALID_PARAMETER"),
        ({"model": "another"}, "UNKNOWN_MODEL"),
    ],
)
def test_a_bad_request_is_refused_by_its_reason_and_takes_nothing(changes, reason):
    bench = Bench()
    session = bench.open(**{"prompt": PROMPT, **changes})
    assert error_of(session) == reason
    assert bench.engine.load().num_active_sessions == 0


def test_a_prompt_that_leaves_room_for_one_token_gets_one():
    bench = Bench()
    session = bench.open((1,) * 127, stop=StopCriteria(ignore_end_of_sequence=True))
    bench.run(session)
    assert len(session.token_ids) == 1


def test_without_a_limit_the_output_fills_the_context():
    bench = Bench()
    session = bench.open(PROMPT, stop=StopCriteria(ignore_end_of_sequence=True))
    bench.run(session)
    assert len(session.token_ids) == 125


def test_a_lower_epoch_and_an_equal_one_with_another_nonce_are_fenced():
    bench = Bench()
    bench.open(PROMPT, epoch=5)
    for epoch, nonce in ((4, b"n" * 16), (5, b"m" * 16)):
        late = bench.open(PROMPT, epoch=epoch, nonce=nonce)
        assert late.events == [Fenced(5)]


def test_fencing_outlives_the_session():
    bench = Bench()
    bench.close(bench.open(PROMPT, epoch=5))
    assert bench.open(PROMPT, epoch=4).events == [Fenced(5)]


def test_a_higher_epoch_takes_the_session_and_fences_the_old_owner():
    bench = Bench()
    old = bench.open(PROMPT, epoch=1)
    bench.step()
    new = bench.open(PROMPT, epoch=2, nonce=b"m" * 16)
    assert old.events[-1] == Fenced(2)
    bench.close(old)
    bench.run(new)
    assert [*new.opened.kept_token_ids, *new.token_ids] == greedy_token_ids(PROMPT, 12)


def test_the_same_owner_cannot_open_twice():
    bench = Bench()
    bench.open(PROMPT)
    assert error_of(bench.open(PROMPT)) == "SESSION_EXISTS"


def test_a_closed_session_frees_its_rows_at_once():
    bench = Bench()
    session = bench.open(PROMPT)
    bench.step()
    bench.close(session)
    forwards = bench.runner.num_forwards
    assert bench.step() is None
    assert bench.runner.num_forwards == forwards
    assert bench.engine.load().kv_used_bytes == 0


def test_sessions_beyond_the_limit_wait_and_those_beyond_the_queue_are_turned_away():
    bench = Bench(max_sessions=1, max_waiting_sessions=1)
    first, second, third = (bench.open(PROMPT, session_id=name) for name in "abc")
    assert error_of(third) == "OVERLOADED"
    assert third.of(SpecdecError)[0].retry_after_s
    bench.run(first, second)
    assert first.token_ids == second.token_ids == greedy_token_ids(PROMPT, 12)


def test_a_tenant_that_fills_the_queue_gives_places_to_others_up_to_an_equal_share():
    bench = Bench(max_sessions=1, max_waiting_sessions=4)
    running, *flood = (bench.open(PROMPT, session_id=f"many-{index}", tenant="many") for index in range(6))
    assert [is_turned_away(session) for session in flood] == [False] * 4 + [True]
    few = [bench.open(PROMPT, session_id=f"few-{index}", tenant="few") for index in range(3)]
    assert [is_turned_away(session) for session in flood] == [False] * 2 + [True] * 3  # the last to come go first
    assert all(session.of(SpecdecError)[0].retry_after_s for session in flood[2:])
    assert [is_turned_away(session) for session in few] == [False, False, True]
    assert is_turned_away(bench.open(PROMPT, session_id="more", tenant="many"))
    assert bench.engine.load().num_waiting_sessions == 4
    bench.run(running, *flood[:2], *few[:2])
    assert all(session.finished for session in (running, *flood[:2], *few[:2]))


def test_a_failed_forward_ends_its_sessions_and_not_the_engine():
    bench = Bench()
    doomed = bench.open(PROMPT, session_id="doomed")
    bench.runner.fails = True
    bench.step()
    bench.runner.fails = False
    assert error_of(doomed) == "INTERNAL"
    after = bench.open(PROMPT, session_id="after")
    bench.run(after)
    assert after.token_ids == greedy_token_ids(PROMPT, 12)


def test_draining_tells_owners_takes_no_new_sessions_and_finishes_the_open_ones():
    bench = Bench()
    session = bench.open(PROMPT)
    bench.engine.drain(5.0)
    assert session.of(Draining) == [Draining(5.0)]
    assert error_of(bench.open(PROMPT, session_id="new")) == "DRAINING"
    bench.run(session)


def test_nan_penalties_never_reach_the_engine():
    session = Bench().open(PROMPT, sampling=SamplingParams(temperature=0.0, presence_penalty=math.nan))
    assert error_of(session) == "INVALID_PARAMETER"


@pytest.mark.parametrize("committed", [(*PROMPT, 24), (*PROMPT, -1)])
def test_output_that_a_client_claims_to_have_received_is_checked_against_the_vocabulary(committed):
    assert error_of(Bench().open(PROMPT, epoch=2, committed=committed)) == "TOKEN_OUT_OF_VOCABULARY"


def test_more_committed_output_than_the_context_takes_is_refused_and_hurts_nobody():
    bench = Bench()
    other = bench.open(PROMPT, session_id="other")
    stop = StopCriteria(ignore_end_of_sequence=True)
    for changes in ({"committed": (*PROMPT, *[1] * 200)}, {"recorded": [1] * 200, "recorded_epoch": 1}):
        assert error_of(bench.open(PROMPT, epoch=2, stop=stop, **changes)) == "MALFORMED_REQUEST"
    bench.run(other)
    assert other.token_ids == greedy_token_ids(PROMPT, 12)


@pytest.mark.parametrize("recorded", [(24,), (-1,)])
def test_recorded_tokens_are_checked_against_the_vocabulary(recorded):
    assert error_of(Bench().open(PROMPT, epoch=2, recorded=recorded, recorded_epoch=1)) == "TOKEN_OUT_OF_VOCABULARY"


def test_an_open_that_comes_again_after_its_session_had_rounds_is_fenced():
    bench = Bench()
    session = bench.open(PROMPT, epoch=5)
    bench.step()
    assert session.token_ids
    bench.close(session)
    assert bench.open(PROMPT, epoch=5).events == [Fenced(5)]
    assert bench.open(PROMPT, epoch=6).opened


def test_an_open_that_was_turned_away_or_closed_before_any_round_may_come_again():
    bench = Bench(max_sessions=1, max_waiting_sessions=0)
    first = bench.open(PROMPT, session_id="first")
    assert is_turned_away(bench.open(PROMPT))
    bench.close(first)
    bench.close(bench.open(PROMPT))
    session = bench.open(PROMPT)
    bench.run(session)
    assert session.token_ids == greedy_token_ids(PROMPT, 12)


def test_a_verifier_that_goes_ends_the_sessions_that_are_still_there():
    bench = Bench(max_sessions=1)
    running, waiting = bench.open(PROMPT, session_id="running"), bench.open(PROMPT, session_id="waiting")
    bench.step()
    bench.engine.drain(5.0)
    assert running.of(Draining) == waiting.of(Draining) == [Draining(5.0)]
    bench.engine.end_sessions()
    assert error_of(running) == error_of(waiting) == "DRAINING"
    assert bench.engine.load().num_active_sessions == bench.engine.load().num_waiting_sessions == 0
    bench.engine.check_cache()


def test_a_refused_second_open_does_not_close_the_first():
    bench = Bench()
    first, second = bench.open(PROMPT), bench.open(PROMPT)
    bench.close(second)
    bench.run(first)
    assert first.token_ids == greedy_token_ids(PROMPT, 12)


def test_without_a_waiting_queue_an_idle_verifier_still_takes_sessions():
    bench = Bench(max_sessions=1, max_waiting_sessions=0)
    first = bench.open(PROMPT, session_id="first")
    assert error_of(bench.open(PROMPT, session_id="second")) == "OVERLOADED"
    bench.run(first)


def test_a_stop_token_among_the_padding_rows_is_no_fault_and_never_comes():
    stop = StopCriteria(max_new_tokens=4, stop_token_ids=(23,), ignore_end_of_sequence=True)
    bench = Bench()
    session = bench.open(PROMPT, sampling=SamplingParams(temperature=0.0, min_tokens=2), stop=stop)
    bench.run(session)
    assert session.token_ids == greedy_token_ids(PROMPT, 4)


def test_a_cache_that_cannot_grow_ends_its_own_session_alone():
    bench = Bench()
    doomed, other = (bench.open(PROMPT, session_id=name) for name in ("doomed", "other"))

    def out_of_memory(num_slots: int) -> None:
        raise RuntimeError("out of memory")

    bench.runner.caches[0].reserve = out_of_memory
    bench.run(other)
    assert error_of(doomed) == "INTERNAL"
    assert other.token_ids == greedy_token_ids(PROMPT, 12)


def test_a_new_prompt_is_served_while_running_sessions_want_every_row():
    bench = Bench(max_step_rows=4, max_sessions=16)
    stop = StopCriteria(max_new_tokens=60, ignore_end_of_sequence=True)
    running = [bench.open((1 + i,), session_id=f"r{i}", stop=stop) for i in range(6)]
    bench.step()
    late = bench.open(PROMPT, session_id="late", stop=StopCriteria(max_new_tokens=1))
    for _ in range(8):
        bench.step()
    assert late.finished
    bench.run(*running)


def test_the_owner_of_an_open_session_is_never_forgotten(monkeypatch):
    monkeypatch.setattr("verifier_service.owners.MAX_REMEMBERED_OWNERS", 2)
    bench = Bench()
    session = bench.open(PROMPT, session_id="kept", epoch=5)
    for index in range(4):
        bench.close(bench.open(PROMPT, session_id=f"s{index}"))
    assert bench.open(PROMPT, session_id="kept", epoch=4).events == [Fenced(5)]
    bench.run(session)


def test_whoever_waits_is_admitted_when_a_running_session_is_taken_over_with_its_output_complete():
    bench = Bench(max_sessions=1)
    bench.open(PROMPT, session_id="taken over")
    waiting = bench.open((8, 9), session_id="waiting")
    complete = (*PROMPT, *greedy_token_ids(PROMPT, 12))
    assert bench.open(PROMPT, session_id="taken over", epoch=2, committed=complete).finished
    bench.run(waiting)
    assert waiting.token_ids == greedy_token_ids((8, 9), 12)
