"""What verdicts teach of a verifier's time."""

import random

import pytest

from drafter_service.verify_times import VerifyTimes


def steps_of_six_rows(num_rows: int) -> float:
    """The shape of a verifier whose kernels take rows six at a time."""
    return 0.146 + 0.004 * (num_rows - 1) if num_rows <= 6 else 0.15 + 0.13 * (-(-num_rows // 6) - 1)


def test_nothing_is_expected_before_anything_was_observed() -> None:
    times = VerifyTimes()
    assert times.expected_s(5) == 0.0
    assert times.max_tried_rows == 0


def test_a_single_observation_is_taken_to_hold_for_any_row_count() -> None:
    times = VerifyTimes()
    times.observe(4, 0.1)
    assert times.expected_s(1) == times.expected_s(4) == times.expected_s(40) == pytest.approx(0.1)


def test_a_step_is_known_after_one_try_on_each_side() -> None:
    times = VerifyTimes()
    for num_rows in (1, 6, 7):
        times.observe(num_rows, steps_of_six_rows(num_rows))
    assert times.expected_s(6) < 0.17
    assert times.expected_s(7) > 0.22


def test_the_shape_is_learned_through_noise() -> None:
    rng, times = random.Random(1), VerifyTimes()
    for _ in range(400):
        num_rows = rng.choice((1, 3, 6, 7, 12, 13))
        times.observe(num_rows, steps_of_six_rows(num_rows) * rng.uniform(0.9, 1.1))
    for num_rows in (1, 3, 6, 7, 12, 13):
        assert times.expected_s(num_rows) == pytest.approx(steps_of_six_rows(num_rows), rel=0.15)


def test_more_rows_never_look_cheaper() -> None:
    rng, times = random.Random(2), VerifyTimes()
    for _ in range(100):
        times.observe(rng.randrange(1, 30), rng.uniform(0.05, 0.2))
    expected = [times.expected_s(num_rows) for num_rows in range(1, 40)]
    assert expected == sorted(expected)


def test_load_moves_all_row_counts_though_only_one_is_observed() -> None:
    times = VerifyTimes()
    for num_rows in (1, 6, 12) * 5:
        times.observe(num_rows, steps_of_six_rows(num_rows))
    before = times.expected_s(12)
    for _ in range(40):
        times.observe(6, 2 * steps_of_six_rows(6))
    assert times.expected_s(12) > 1.2 * before


def test_one_stalled_round_does_not_close_a_row_count_for_good() -> None:
    times = VerifyTimes()
    for _ in range(10):
        times.observe(1, 0.1)
        times.observe(4, 0.1)
    times.observe(8, 30.0)
    assert times.expected_s(8) < 0.4
    for _ in range(1500):
        times.observe(4, 0.1)
    assert times.expected_s(8) < 0.2  # evidence that old has little weight
