"""Every kind of wrong, late or hostile draft is answered by its reason, and the stream goes on."""

import math

import pytest

from specdec.errors import SpecdecError
from specdec.messages import (
    Advance,
    Attached,
    AttachRefusal,
    AttachRefused,
    Commit,
    Detach,
    Dropped,
    Refused,
    SparseDistribution,
    Verdict,
)
from specdec.params import AcceptanceRule, SamplingParams, SpeculationOptions, StopCriteria
from tests.unit.verifier_service.harness import NONCE, Bench, Drafter, greedy_token_ids

PROMPT = (5, 6, 7)
EXPECTED = greedy_token_ids(PROMPT, 12)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def drafter(bench):
    return Drafter(bench)


@pytest.fixture
def session(bench, drafter):
    session = bench.open(PROMPT)
    drafter.attach(session)
    bench.step()
    return session


def only_answer(drafter: Drafter, sequence: int):
    (answer,) = drafter.answers()[sequence]
    return answer


def finishes_unharmed(bench, session) -> bool:
    bench.run(session)
    return session.token_ids == EXPECTED


def test_an_attached_drafter_is_told_what_is_committed_and_what_it_may_send(bench, drafter):
    session = bench.open(PROMPT)
    drafter.attach(session)
    (attached,) = drafter.messages
    assert attached == Attached(committed_token_ids=list(PROMPT), start_position=0, seed=None, draft_budget=8)


def test_the_seed_is_told_under_coupled_alone(bench):
    for rule, seed in ((AcceptanceRule.COUPLED, 7), (AcceptanceRule.ONE_HOT, None)):
        drafter = Drafter(bench)
        sampling = SamplingParams(temperature=1.0, seed=7, acceptance_rule=rule)
        drafter.attach(bench.open(PROMPT, session_id=rule.value, sampling=sampling))
        assert drafter.messages[0].seed == seed


def test_a_late_draft_is_used_from_where_it_is_new_when_its_head_was_committed(bench, drafter, session):
    base = len(PROMPT) + len(session.token_ids)
    at = len(session.token_ids)
    bench.step()
    sequence = drafter.draft(session, EXPECTED[at : at + 4], start_position=base)
    bench.step()
    verdict = only_answer(drafter, sequence)
    assert isinstance(verdict, Verdict)
    assert verdict.num_accepted_tokens == 3
    assert verdict.base_position == base + 1


@pytest.mark.parametrize(
    ("shift", "wrong", "reason"),
    [(-1, True, "HEAD_DIFFERS"), (-1, False, "TOO_LATE"), (3, False, "TOO_EARLY")],
)
def test_a_draft_that_does_not_fit_is_dropped_by_its_reason(bench, drafter, session, shift, wrong, reason):
    at = len(session.token_ids) + shift
    right = EXPECTED[at]
    sequence = drafter.draft(session, [right + 1 if wrong else right], start_position=len(PROMPT) + at)
    bench.run(session)
    dropped = only_answer(drafter, sequence)
    assert isinstance(dropped, Dropped)
    assert dropped.reason.value == reason
    assert session.token_ids == EXPECTED


def test_after_a_draft_that_came_too_late_the_round_waits_for_the_next_one(bench, drafter, session):
    """Else each draft would come for the round that has just begun, and none would ever be used."""
    at = len(session.token_ids)
    drafter.draft(session, [EXPECTED[at - 1]], start_position=len(PROMPT) + at - 1)
    wake_at = bench.step()
    assert wake_at is not None
    assert wake_at > bench.now
    assert len(session.token_ids) == at
    sequence = drafter.draft(session, EXPECTED[at : at + 2])
    bench.step()
    assert only_answer(drafter, sequence).num_accepted_tokens == 2


@pytest.mark.parametrize("shift", [-1, 3])
def test_one_useless_draft_after_the_other_does_not_hold_up_a_round(bench, drafter, session, shift):
    """Each would be waited for anew, as the answer to the one before asked for it."""
    at = len(session.token_ids)
    first = drafter.draft(session, [], start_position=len(PROMPT) + at + shift)
    assert bench.step() > bench.now
    second = drafter.draft(session, [], start_position=len(PROMPT) + at + shift)
    bench.step()
    assert len(session.token_ids) == at + 1
    assert isinstance(only_answer(drafter, first), Dropped)
    assert isinstance(only_answer(drafter, second), Dropped)
    assert bench.now == 0.0
    assert finishes_unharmed(bench, session)


def test_a_dropped_draft_tells_what_its_drafter_missed(bench, drafter, session):
    told = len(PROMPT)
    for message in drafter.messages:
        told += len(message.committed_token_ids) if isinstance(message, Advance) else 0
    drafter.draft(session, [1], start_position=len(PROMPT) + 9)
    bench.step()
    known = list(PROMPT)
    for message in drafter.messages:
        if isinstance(message, Advance):
            known += message.committed_token_ids
        if isinstance(message, Dropped):
            known += message.missing_token_ids
    assert known[: len(PROMPT) + len(session.token_ids)] == [*PROMPT, *session.token_ids]


def test_stale_epoch_duplicate_and_superseded_drafts_are_dropped(bench, drafter, session):
    stale = drafter.draft(session, EXPECTED[1:3], epoch=session.epoch - 1)
    older = drafter.draft(session, [1])
    newer = drafter.draft(session, EXPECTED[1:3])
    bench.step()
    duplicate = drafter.draft(session, EXPECTED[1:3], draft_sequence=newer)
    bench.step()
    assert only_answer(drafter, stale).reason.value == "STALE_EPOCH"
    assert only_answer(drafter, older).reason.value == "SUPERSEDED"
    first, second = drafter.answers()[newer]
    assert isinstance(first, Verdict)
    assert second.reason.value == "DUPLICATE"
    assert duplicate not in drafter.answers()
    assert finishes_unharmed(bench, session)


def test_a_draft_on_an_attachment_that_is_over_is_dropped_and_one_that_never_was_is_refused(bench, drafter, session):
    drafter.attach(session, 2)
    over = drafter.draft(session, [1], attachment_id=1)
    never = drafter.draft(session, [1], attachment_id=99)
    assert only_answer(drafter, over).reason.value == "STALE_ATTACHMENT"
    assert only_answer(drafter, never).reason.value == "UNKNOWN_ATTACHMENT"
    assert drafter.detached == ["REPLACED"]
    assert finishes_unharmed(bench, session)


NORMAL = SparseDistribution((1, 2), (0.5, 0.5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_token_ids": (24,)}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"draft_token_ids": (-1,)}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"draft_token_ids": (1,) * 513}, "TOO_MANY_NODES"),
        ({"draft_token_ids": (1, 2), "parent_indices": (1, -1)}, "MALFORMED_TREE"),
        ({"draft_token_ids": (1, 2), "parent_indices": (-1,)}, "MALFORMED_TREE"),
        ({"start_position": -1}, "MALFORMED_DRAFT"),
        ({"draft_probs": (NORMAL,)}, "NOT_ALLOWED_BY_RULE"),
    ],
)
def test_a_malformed_draft_is_refused_by_its_reason_and_the_output_goes_on(bench, drafter, session, changes, reason):
    sequence = drafter.draft(session, (1,), **changes)
    refused = only_answer(drafter, sequence)
    assert isinstance(refused, Refused)
    assert refused.reason.value == reason
    assert finishes_unharmed(bench, session)
    assert session.finished.speculative.num_refused_drafts == 1


@pytest.mark.parametrize(
    ("distributions", "reason"),
    [
        ((SparseDistribution((1, 2), (0.5, 0.4)),), "UNNORMALISED"),
        ((SparseDistribution((1, 2), (math.nan, 0.5)),), "INVALID_PROBABILITY"),
        ((SparseDistribution((1, 2), (math.inf, 0.5)),), "INVALID_PROBABILITY"),
        ((SparseDistribution((1, 2), (1.5, -0.5)),), "INVALID_PROBABILITY"),
        ((SparseDistribution((2, 3), (0.5, 0.5)),), "MISSING_PROBABILITY"),
        ((), "MISSING_PROBABILITY"),
    ],
)
def test_bad_draft_probabilities_are_refused_under_rejection(bench, drafter, distributions, reason):
    sampling = SamplingParams(temperature=1.0, seed=1, acceptance_rule=AcceptanceRule.REJECTION)
    session = bench.open(PROMPT, sampling=sampling)
    drafter.attach(session)
    bench.step()
    sequence = drafter.draft(session, (1,), draft_probs=distributions)
    assert only_answer(drafter, sequence).reason.value == reason
    bench.run(session)


def test_a_drafter_that_breaks_rules_again_and_again_is_detached(bench, drafter, session):
    for _ in range(20):
        drafter.draft(session, [999])
    assert drafter.detached == ["MISBEHAVED"]
    assert finishes_unharmed(bench, session)


def test_a_draft_over_budget_is_cut_to_it(drafter):
    bench = Bench(max_draft_tokens=2)
    drafter.bench = bench
    session = bench.open(PROMPT)
    drafter.attach(session)
    bench.step()
    at = len(session.token_ids)
    sequence = drafter.draft(session, EXPECTED[at : at + 6])
    bench.step()
    assert only_answer(drafter, sequence).num_accepted_tokens == 2
    assert session.of(Commit)[-1].statistics.num_draft_tokens == 2


def test_an_empty_draft_says_do_not_wait_and_gets_its_verdict(bench, drafter, session):
    drafter.draft(session, EXPECTED[1:2])
    bench.step()
    forwards = bench.runner.num_forwards
    sequence = drafter.draft(session, [])
    bench.step()
    assert bench.runner.num_forwards == forwards + 1
    assert only_answer(drafter, sequence).num_accepted_tokens == 0


def test_nobody_waits_without_a_drafter_or_for_one_that_has_not_delivered(bench, drafter):
    alone = bench.open(PROMPT, session_id="alone")
    silent = bench.open(PROMPT, session_id="silent")
    drafter.attach(silent)
    bench.run(alone, silent)
    assert bench.now == 0.0
    assert silent.token_ids == EXPECTED
    assert silent.finished.speculative.num_fallback_decodes > 0


def test_a_round_waits_for_a_drafter_that_delivers_but_not_longer_than_the_policy(bench, drafter, session):
    drafter.draft(session, EXPECTED[1:2])
    bench.step()
    forwards = bench.runner.num_forwards
    wake_at = bench.step()
    assert wake_at == bench.now + bench.policy.draft_wait_s
    assert bench.runner.num_forwards == forwards
    bench.now = wake_at
    bench.step()
    assert bench.runner.num_forwards == forwards + 1
    assert session.of(Commit)[-1].statistics.fallback_decode


def test_a_request_may_forbid_waiting(bench, drafter):
    session = bench.open(PROMPT, speculation=SpeculationOptions(max_draft_wait_s=0.0))
    drafter.attach(session)
    bench.step()
    drafter.draft(session, EXPECTED[1:2])
    bench.run(session)
    assert bench.now == 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attach_key": b"guess"}, "BAD_KEY"),
        ({"epoch": 9}, "STALE_EPOCH"),
        ({"protocol_version": 99}, "PROTOCOL_VERSION"),
        ({"tokenizer_fingerprint": "another"}, "TOKENIZER_MISMATCH"),
        ({"vocabulary_size": 21}, "VOCABULARY_MISMATCH"),
        ({"vocabulary_size": 50_000}, "VOCABULARY_MISMATCH"),
        ({"context_limit": 3}, "CONTEXT_TOO_SHORT"),
        ({"known_length": 4}, "BAD_KNOWN_LENGTH"),
        ({"known_length": -1}, "BAD_KNOWN_LENGTH"),
        ({"wants_hidden_states": True}, "NO_HIDDEN_STATES"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_at_attach_by_its_reason(bench, drafter, changes, reason):
    session = bench.open(PROMPT)
    drafter.attach(session, **changes)
    (refused,) = drafter.messages
    assert isinstance(refused, AttachRefused)
    assert refused.reason.value == reason
    assert finishes_unharmed(bench, session)


def test_a_session_without_speculation_takes_no_drafter_and_says_why(bench, drafter):
    session = bench.open(PROMPT, speculation=SpeculationOptions(disabled=True))
    drafter.attach(session)
    assert drafter.messages[0].reason.value == "SPECULATION_DISABLED"
    bench.run(session)
    assert session.finished.speculative.disabled_reason == "REQUESTED"


def test_a_lower_or_equal_attachment_is_stale(bench, drafter, session):
    drafter.attach(session, 1)
    assert drafter.messages[-1].reason.value == "STALE_ATTACHMENT"


def test_an_end_of_the_session_answers_the_draft_that_still_waits(bench, drafter, session):
    sequence = drafter.draft(session, EXPECTED[1:2])
    bench.close(session)
    assert only_answer(drafter, sequence).reason.value == "SESSION_ENDED"
    assert drafter.detached == ["SESSION_ENDED"]
    late = drafter.draft(session, [1])
    assert only_answer(drafter, late).reason.value == "STALE_ATTACHMENT"


def test_a_broken_stream_costs_speed_alone(bench, drafter, session):
    drafter.draft(session, EXPECTED[1:4])
    bench.engine.drafters.stream_broken(drafter.stream)
    assert finishes_unharmed(bench, session)
    assert bench.engine.load().num_attachments == 0


def test_a_drafter_that_missed_tokens_is_told_them_all_in_order(bench, session):
    late = Drafter(bench)
    bench.step()
    late.attach(session, 2)
    known = list(late.messages[-1].committed_token_ids)
    bench.run(session)
    for message in late.messages:
        known += message.committed_token_ids if isinstance(message, Advance | Verdict) else []
    assert known == [*PROMPT, *EXPECTED]
    assert NONCE  # the owner's nonce is the same for both attachments


def test_the_limit_on_tokens_left_bounds_the_draft(bench, drafter):
    session = bench.open(PROMPT, stop=StopCriteria(max_new_tokens=3, ignore_end_of_sequence=True))
    drafter.attach(session)
    bench.step()
    drafter.draft(session, EXPECTED[1:8])
    bench.step()
    assert session.of(Commit)[-1].statistics.num_draft_tokens <= 2
    assert session.finished


def test_an_empty_promise_before_the_first_round_delays_it_by_nothing(bench, drafter):
    """A draft that is dropped while the session waits for its first round, and silence after it."""
    session = bench.open((5,))
    drafter.attach(session)
    drafter.draft(session, [1], start_position=9)
    bench.run(session)
    assert session.token_ids == greedy_token_ids((5,), 12)


def test_a_failed_forward_still_answers_the_draft_that_was_in_it(bench, drafter, session):
    sequence = drafter.draft(session, EXPECTED[1:3])
    bench.runner.fails = True
    bench.step()
    assert only_answer(drafter, sequence).reason.value == "SESSION_ENDED"
    assert drafter.detached == ["SESSION_ENDED"]


def test_a_session_that_makes_every_forward_fail_fails_alone():
    bench = Bench()
    outputs = [greedy_token_ids((1 + index, 3), 12) for index in range(5)]
    fatal = next(token_id for token_id in range(6, 22) if all(token_id not in output for output in outputs))
    bench.runner.fatal_token_id = fatal
    sessions = [bench.open((1 + index, 3), session_id=f"s{index}") for index in range(5)]
    bad = bench.open((fatal, 3), session_id="bad")
    drafter = Drafter(bench)
    drafter.attach(bad)
    sequence = drafter.draft(bad, [1])
    bench.run(*sessions)
    assert [session.token_ids for session in sessions] == outputs
    assert len(bad.of(SpecdecError)) == 1
    assert only_answer(drafter, sequence).reason.value == "SESSION_ENDED"
    bench.engine.check_cache()


def test_a_drafter_that_repeats_a_refused_attach_fills_no_queue(bench, drafter, session):
    before = len(session.events)
    for _ in range(50):
        drafter.attach(session, 1)
    for _ in range(50):
        drafter.attach(session, 7, protocol_version=99)
    assert len(session.events) == before + 1
    assert finishes_unharmed(bench, session)


def test_a_draft_time_is_never_longer_than_the_drafter_was_silent(bench, drafter, session):
    bench.now += 0.25
    drafter.draft(session, EXPECTED[1:3], draft_time_s=1e11)
    bench.step()
    statistics = session.of(Commit)[-1].statistics
    assert (statistics.draft_time_s, statistics.round_trip_time_s) == (0.25, 0.0)


def test_accepted_nodes_of_a_late_and_cut_tree_are_told_by_the_drafters_own_numbers(drafter):
    bench = Bench(max_draft_tokens=2)
    drafter.bench = bench
    session = bench.open(PROMPT)
    drafter.attach(session)
    bench.step()
    base, at = len(PROMPT) + len(session.token_ids), len(session.token_ids)
    bench.step()
    right, wrong = EXPECTED[at : at + 3], EXPECTED[at + 1] + 1
    tokens = [wrong, right[0], wrong, right[1], right[2]]
    sequence = drafter.draft(session, tokens, start_position=base, parent_indices=(-1, -1, 1, 1, 3))
    bench.step()
    verdict = only_answer(drafter, sequence)
    assert list(verdict.accepted_node_indices) == [3]
    assert finishes_unharmed(bench, session)


def test_a_drafter_that_always_answers_too_late_is_not_waited_for_again(bench, drafter, session):
    """Else every round on a busy machine would cost a whole wait."""
    drafter.draft(session, EXPECTED[1:2])
    bench.step()
    bench.now = bench.step()
    bench.step()
    bench.now += 3 * bench.policy.draft_wait_s
    drafter.draft(session, EXPECTED[len(session.token_ids) : len(session.token_ids) + 1])
    bench.step()
    before = bench.now
    bench.run(session)
    assert bench.now == before


def test_a_lone_session_stops_waiting_for_a_drafter_that_never_has_a_guess_and_says_so_late(drafter):
    bench, forward_s, num_tokens = drafter.bench, 0.03, 100
    bench.runner.on_forward = lambda num_rows: setattr(bench, "now", bench.now + forward_s)
    session = bench.open(PROMPT, stop=StopCriteria(max_new_tokens=num_tokens, ignore_end_of_sequence=True))
    drafter.attach(session)
    num_seen, due_at = 0, None
    while not session.finished:
        wake_at = bench.step()
        wants_draft = any(getattr(message, "draft_budget", 0) > 0 for message in drafter.messages[num_seen:])
        num_seen = len(drafter.messages)
        if wants_draft and due_at is None:
            due_at = bench.now + 3 * forward_s
        if due_at is not None and bench.now >= due_at:
            drafter.draft(session, [])
            due_at = None
        elif wake_at is not None and wake_at > bench.now:
            bench.now = wake_at if due_at is None else min(wake_at, due_at)
    assert bench.now < 1.6 * num_tokens * forward_s  # four times as long, if every round waited


def test_one_stream_has_so_many_attachments_and_a_place_is_free_again_when_one_ends():
    bench = Bench(max_attachments_per_stream=2)
    sessions = [bench.open(PROMPT, session_id=f"s{index}") for index in range(3)]
    drafter = Drafter(bench)
    for session in sessions:
        drafter.attach(session)
    assert [getattr(message, "reason", None) for message in drafter.messages] == [
        None,
        None,
        AttachRefusal.TOO_MANY_ATTACHMENTS,
    ]
    drafter.send(sessions[0], 1, Detach())
    drafter.attach(sessions[2], 2)
    assert isinstance(drafter.messages[-1], Attached)


@pytest.mark.parametrize("limit", [-1, -(2**31), 1, len(PROMPT)])
def test_a_context_that_is_negative_or_full_already_is_too_short(limit):
    bench = Bench()
    session = bench.open(PROMPT)
    drafter = Drafter(bench)
    drafter.attach(session, context_limit=limit)
    assert drafter.messages[0].reason is AttachRefusal.CONTEXT_TOO_SHORT
