"""A step waits for drafts where that pays, as a whole or not at all; rounds are never fewer than without drafters."""

import heapq
import math
from collections.abc import Callable

import pytest

from specdec.messages import Advance, Attached, Commit, Dropped, Verdict
from specdec.params import StopCriteria
from tests.unit.verifier_service.harness import Bench, Drafter, HashRunner, Session, greedy_token_ids
from verifier_service.patience import MIN_WAIT_S, AwaitedDraft, worth_waiting_until
from verifier_service.scheduler import SchedulerPolicy
from verifier_service.session import VerifierSession

FORWARD_S = 0.03


def due_in(wait_s: float, gain: float = 2.0, deadline: float = math.inf) -> AwaitedDraft:
    return AwaitedDraft(100.0 + wait_s, wait_s, gain, deadline)


def wait_for(*drafts: AwaitedDraft, num_ready: int = 0, ready_for_s: float = 0.0) -> tuple[float, int]:
    until, num_drafts = worth_waiting_until(drafts, num_ready, 100.0 - ready_for_s, FORWARD_S, now=100.0)
    return pytest.approx(until - 100.0), num_drafts


def test_drafts_that_are_due_soon_are_waited_for_all_together():
    assert wait_for(due_in(0.002), due_in(0.004), due_in(0.003)) == (0.004, 3)


def test_drafts_that_come_too_late_or_bring_nothing_are_not_waited_for():
    assert wait_for(due_in(0.2)) == (0.0, 0)
    assert wait_for(due_in(0.002, gain=0.0)) == (0.0, 0)
    assert wait_for(due_in(0.002), due_in(0.2)) == (0.002, 1)


def test_who_is_ready_waits_for_others_half_a_forward_at_most():
    assert wait_for(due_in(0.014, gain=20.0), num_ready=3) == (0.014, 1)
    assert wait_for(due_in(0.016, gain=20.0), num_ready=3) == (0.0, 0)
    assert wait_for(due_in(0.014, gain=20.0), num_ready=3, ready_for_s=0.002) == (0.0, 0)


def test_an_overdue_draft_is_given_as_long_again_and_then_given_up():
    assert wait_for(due_in(0.0)) == (MIN_WAIT_S, 1)
    assert wait_for(due_in(-0.01)) == (0.01, 1)
    assert wait_for(due_in(-0.1)) == (0.0, 0)


def test_nobody_waits_beyond_the_policy():
    assert wait_for(due_in(0.01, deadline=100.005)) == (0.0, 0)


def test_a_step_of_one_row_which_would_starve_prompts_is_refused():
    with pytest.raises(ValueError, match="two rows"):
        SchedulerPolicy(1, 8, 1.0)


class TimedDrafters:
    """Drafters that know the target's output: each draft takes its time, one after another, while forwards run."""

    def __init__(self, bench: Bench, runner: HashRunner, draft_s: float, num_right: int) -> None:
        self.bench = bench
        self.draft_s = draft_s
        self.num_right = num_right
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.free_at = 0.0
        self.num_events = 0
        self.num_drafts = 0
        self.messages: list[object] = []
        self.num_forwards = 0
        runner.on_forward = self.on_forward

    def on_forward(self, num_rows: int) -> None:
        self.num_forwards += 1
        self.bench.now += FORWARD_S

    def attach(self, session: Session, expected: list[int]) -> None:
        drafter = Drafter(self.bench)
        prompt_length = len(session.opened.prompt_token_ids)
        length, budget, is_pending = prompt_length, 0, False

        def told(addressed: object) -> None:
            nonlocal length, budget, is_pending
            message = addressed.message
            self.messages.append(message)
            if isinstance(message, Attached):
                length = message.start_position + len(message.committed_token_ids)
            elif isinstance(message, Verdict | Advance | Dropped):
                length = message.committed_length
            budget = getattr(message, "draft_budget", 0)
            if isinstance(message, Verdict | Dropped):
                is_pending = False
            if budget > 0 and not is_pending:
                is_pending = True
                begins_at = max(self.free_at, self.bench.now)
                self.free_at = begins_at + self.draft_s
                self.at(begins_at, begin)

        def begin(now: float) -> None:
            start = length
            self.at(now + self.draft_s, lambda now: send(start, now))

        def send(start: int, now: float) -> None:
            self.num_drafts += 1
            at = start - prompt_length
            wrong = [1 + expected[at + self.num_right] % 20] if at + self.num_right < len(expected) else []
            drafter.draft(session, [*expected[at : at + self.num_right], *wrong], start_position=start, arrived_at=now)

        drafter.stream.send = told
        drafter.attach(session)

    def at(self, time: float, event: Callable[[float], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, event))

    def run(self, *sessions: Session) -> None:
        for _ in range(3000):
            if all(session.finished for session in sessions):
                return
            while self.events and self.events[0][0] <= self.bench.now:
                time, _, event = heapq.heappop(self.events)
                event(time)
            wake_at = self.bench.step()
            if wake_at is None or wake_at > self.bench.now:
                self.bench.now = min(wake_at or math.inf, self.events[0][0] if self.events else math.inf)
        raise TimeoutError


def endless_token_ids(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids += greedy_token_ids(token_ids, 1)
    return token_ids[len(prompt) :]


def run_drafters(num_sessions: int, draft_s: float, num_right: int, num_tokens: int) -> tuple[TimedDrafters, float]:
    """The drafters after all is done, and one session's tokens by the time of forwards that passed."""
    runner = HashRunner(num_blocks=1000, context_limit=1024)
    bench = Bench(runner=runner)
    drafters = TimedDrafters(bench, runner, draft_s, num_right)
    stop = StopCriteria(max_new_tokens=num_tokens, ignore_end_of_sequence=True)
    prompts = [(1 + index, 3) for index in range(num_sessions)]
    sessions = [bench.open(prompt, session_id=f"s{prompt[0]}", stop=stop) for prompt in prompts]
    outputs = [endless_token_ids(prompt, num_tokens) for prompt in prompts]
    for session, output in zip(sessions, outputs, strict=True):
        drafters.attach(session, output)
    drafters.run(*sessions)
    assert [session.token_ids for session in sessions] == outputs
    return drafters, num_tokens * FORWARD_S / bench.now


def test_sessions_whose_drafts_come_soon_share_their_forwards():
    """Each has its draft in every forward but those of trials; to run for the first draft alone would halve this."""
    drafters, by_time = run_drafters(4, draft_s=0.0005, num_right=2, num_tokens=300)
    assert 300 / drafters.num_forwards > 2.4
    assert by_time > 2.2


@pytest.mark.parametrize("draft_s", [0.005, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("num_right", [0, 3])
@pytest.mark.parametrize("num_sessions", [2, 8])
def test_drafters_that_are_slow_or_wrong_cost_next_to_nothing(draft_s, num_right, num_sessions):
    _, by_time = run_drafters(num_sessions, draft_s, num_right, num_tokens=60)
    assert by_time >= 0.96


def test_a_lone_session_waits_for_a_draft_of_several_forwards():
    """Not waited for, such a draft has little left that is new, and what it brings says that it is worth little."""
    _, by_time = run_drafters(1, draft_s=2 * FORWARD_S, num_right=5, num_tokens=60)
    assert by_time > 1.5


def test_drafts_that_are_always_late_are_asked_for_less_and_less():
    drafters, by_time = run_drafters(4, draft_s=0.05, num_right=1, num_tokens=100)
    assert drafters.num_drafts < 30  # of 60 that its time allows
    assert by_time >= 0.97


def test_drafters_that_are_too_slow_for_all_sessions_serve_some_of_them():
    _, by_time = run_drafters(8, draft_s=0.02, num_right=3, num_tokens=80)
    assert by_time > 1.05


def test_a_lone_session_whose_drafts_bring_nothing_goes_on_without_them():
    drafters, by_time = run_drafters(1, draft_s=0.6, num_right=0, num_tokens=400)
    budgets = [message.draft_budget for message in drafters.messages if isinstance(message, Advance)]
    assert 0 in budgets
    assert by_time >= 0.9  # nobody knows at first that its first draft is not worth the wait


def test_a_drafter_without_a_budget_reads_along_in_chunks_and_knows_everything_when_it_has_one_again():
    bench = Bench(default_max_new_tokens=100)
    session = bench.open((5, 6, 7), stop=StopCriteria(max_new_tokens=100, ignore_end_of_sequence=True))
    drafter = Drafter(bench)
    drafter.attach(session)
    budget = 0
    bench.engine._flow.assign = lambda sessions: [  # type: ignore[method-assign]
        setattr(each, "draft_budget", budget) for each in sessions
    ]
    for _ in range(70):
        bench.step()
    advances = [message for message in drafter.messages if isinstance(message, Advance)]
    assert [len(message.committed_token_ids) for message in advances] == [32, 32]
    budget = 4
    bench.engine.drafters.tell_budget(session_of(bench))
    bench.step()
    told = [
        token_id
        for message in drafter.messages
        if isinstance(message, Advance)
        for token_id in message.committed_token_ids
    ]
    assert told == session.token_ids


def test_a_session_that_might_never_draft_says_why():
    bench = Bench(runner=HashRunner(num_blocks=1000, context_limit=1024))
    bench.runner.on_forward = lambda num_rows: setattr(bench, "now", bench.now + FORWARD_S)
    bench.engine._flow._trials.num_speculating = lambda *load, **options: 0  # type: ignore[method-assign]
    bench.run(bench.open((1, 2), session_id="before"))  # from here on it is known what forwards take
    session = bench.open((5, 6, 7))
    drafter = Drafter(bench)
    drafter.attach(session)
    bench.run(session)
    assert session.finished.speculative.disabled_reason == "DOES_NOT_PAY"


def session_of(bench: Bench) -> VerifierSession:
    return next(iter(bench.engine._open.values()))


def test_a_drafter_that_was_told_of_no_budget_is_not_waited_for():
    bench = Bench()
    session = bench.open((5, 6, 7))
    drafter = Drafter(bench)
    drafter.attach(session)
    bench.step()
    budgets = iter([0, *[4] * 100])
    bench.engine._flow.assign = lambda sessions: [  # type: ignore[method-assign]
        setattr(each, "draft_budget", next(budgets)) for each in sessions
    ]
    drafter.draft(session, greedy_token_ids((5, 6, 7), 12)[1:2])
    bench.step()
    assert drafter.messages[-1].draft_budget == 0
    num_commits = len(session.of(Commit))
    bench.step()
    assert len(session.of(Commit)) == num_commits + 1
    assert drafter.messages[-1].draft_budget == 4
    assert not session.of(Commit)[-1].statistics.fallback_decode


def test_a_draft_that_came_while_a_forward_ran_counts_from_when_it_came():
    bench = Bench()
    session = bench.open((5, 6, 7))
    drafter = Drafter(bench)
    drafter.attach(session)
    bench.step()
    bench.now = 5.0  # a long forward of others, far beyond the policy's wait
    drafter.draft(session, greedy_token_ids((5, 6, 7), 12)[1:2], arrived_at=0.25)
    bench.step()
    statistics = session.of(Commit)[-1].statistics
    assert statistics.round_trip_time_s == 0.25
    assert statistics.queue_time_s == 4.75
    wake_at = bench.step()
    assert wake_at == 6.0  # it delivers, and is waited for
