"""The time of a forward by its rows, as the engine learns it."""

import random

import numpy as np
import pytest

from verifier_service.forward_times import ForwardTimes


def true_time_s(num_rows: int) -> float:
    """Flat up to eight rows, then a slope: a memory-bound model."""
    return 0.07 + 0.004 * max(0, num_rows - 8)


def learned(num_observations: int = 400, noise: float = 0.0, seed: int = 0, max_rows: int = 128) -> ForwardTimes:
    generator = random.Random(seed)
    times = ForwardTimes()
    for _ in range(num_observations):
        num_rows = generator.randint(1, max_rows)
        times.observe(num_rows, true_time_s(num_rows) * (1 + noise * generator.random()))
    return times


def test_nothing_is_known_before_the_first_forward():
    times = ForwardTimes()
    assert not times.is_known
    assert times.expected_s(5) == 0.0


def test_one_forward_tells_a_time_for_every_row_count():
    times = ForwardTimes()
    times.observe(4, 0.1)
    assert [times.expected_s(num_rows) for num_rows in (1, 4, 300)] == [0.1, 0.1, 0.1]


def test_learned_times_are_near_the_true_ones_and_beyond_them_follow_the_last_slope():
    times = learned()
    for num_rows in (1, 6, 12, 40, 100, 128, 200):
        assert times.expected_s(num_rows) == pytest.approx(true_time_s(num_rows), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_more_rows_never_take_less_time(seed):
    table = learned(num_observations=60, noise=1.0, seed=seed).table(256)
    assert (np.diff(table) >= 0).all()


def test_a_stalled_forward_hardly_counts():
    times = learned()
    before = times.expected_s(16)
    times.observe(16, 20.0)
    assert times.expected_s(16) < 1.15 * before


def test_a_stall_at_a_row_count_never_seen_does_not_close_it():
    times = ForwardTimes()
    for _ in range(10):
        times.observe(4, 0.1)
    times.observe(8, 30.0)
    for _ in range(10):
        times.observe(8, 0.1)
    assert times.expected_s(8) < 0.12


def test_a_machine_that_became_slower_is_noticed_at_row_counts_that_come_no_more_as_well():
    times = learned(max_rows=40)
    for _ in range(600):
        times.observe(6, 3 * true_time_s(6))
    assert times.expected_s(6) == pytest.approx(3 * true_time_s(6), rel=0.1)
    assert times.expected_s(30) >= 0.8 * times.expected_s(6)
