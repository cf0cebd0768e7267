"""Sessions whose drafts never take part in a round do without them for a while, and try again ever more seldom."""

from verifier_service.vain_drafts import (
    FIRST_REST_ROUNDS,
    MAX_REST_ROUNDS,
    MIN_ROUNDS_IN_VAIN,
    TRIAL_ROUNDS,
    USED_DRAFTS_TO_FORGET,
    VainDrafts,
)


def rests(vain: VainDrafts, num_rounds: int) -> list[int]:
    """Lengths of the rests over rounds of which none has a draft."""
    lengths, is_resting = [], False
    for _ in range(num_rounds):
        if vain.is_resting:
            lengths = lengths if is_resting else [*lengths, 0]
            lengths[-1] += 1
        is_resting = vain.is_resting
        vain.observe_round_alone(was_asked=not vain.is_resting)
    return lengths


def test_drafts_in_vain_lead_to_rests_that_double_up_to_a_limit():
    assert rests(VainDrafts(), 5000)[:8] == [FIRST_REST_ROUNDS * 2**index for index in range(6)] + [MAX_REST_ROUNDS] * 2


def test_a_session_is_asked_in_one_round_of_fifty_at_the_end():
    vain, num_asked = VainDrafts(), 0
    rests(vain, 2000)
    for _ in range(4000):
        num_asked += not vain.is_resting
        vain.observe_round_alone(was_asked=not vain.is_resting)
    assert num_asked <= 4000 / 50


def test_a_draft_in_one_of_a_few_rounds_is_enough():
    vain = VainDrafts()
    for _ in range(100):
        for _ in range(MIN_ROUNDS_IN_VAIN - 1):
            vain.observe_round_alone(was_asked=True)
        vain.observe_draft()
        assert not vain.is_resting


def test_rounds_in_which_nobody_was_asked_count_for_nothing():
    vain = VainDrafts()
    for _ in range(1000):
        vain.observe_round_alone(was_asked=False)
    assert not vain.is_resting


def test_a_drafter_that_is_of_use_for_a_moment_rests_as_long_as_before_and_one_that_stays_so_begins_anew():
    vain = VainDrafts()
    rests(vain, MIN_ROUNDS_IN_VAIN + FIRST_REST_ROUNDS)
    vain.observe_draft()
    assert rests(vain, MIN_ROUNDS_IN_VAIN + 2 * FIRST_REST_ROUNDS) == [2 * FIRST_REST_ROUNDS]
    for _ in range(USED_DRAFTS_TO_FORGET):
        vain.observe_draft()
    assert rests(vain, MIN_ROUNDS_IN_VAIN + FIRST_REST_ROUNDS) == [FIRST_REST_ROUNDS]


def test_sessions_that_began_together_try_again_at_different_times():
    ends = []
    for place in range(16):
        vain, num_rounds = VainDrafts(place), 0
        rests(vain, MIN_ROUNDS_IN_VAIN)
        while vain.is_resting:
            vain.observe_round_alone(was_asked=False)
            num_rounds += 1
        ends.append(num_rounds)
    assert len(set(ends)) >= 10
    assert max(ends) <= 2 * FIRST_REST_ROUNDS


def test_a_trial_is_shorter_than_what_led_to_the_first_rest():
    vain = VainDrafts()
    rests(vain, MIN_ROUNDS_IN_VAIN + FIRST_REST_ROUNDS)
    assert not vain.is_resting
    rests(vain, TRIAL_ROUNDS)
    assert vain.is_resting


def test_what_is_forgotten_is_as_if_it_had_not_been():
    vain = VainDrafts()
    rests(vain, 500)
    vain.forget()
    assert not vain.is_resting
    assert rests(vain, MIN_ROUNDS_IN_VAIN + FIRST_REST_ROUNDS) == [FIRST_REST_ROUNDS]
