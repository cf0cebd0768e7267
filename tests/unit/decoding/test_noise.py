"""Noise is a function of its key: uniform, and independent of everything that is not in the key."""

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.decoding.noise import MAX_GUMBEL, MIN_GUMBEL, Noise, Purpose, splitmix64


def test_bits_are_those_of_the_published_splitmix64():
    # Output of the reference implementation (prng.di.unimi.it/splitmix64.c) from state 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(np.uint64(1234567), index) for index in range(5)] == expected


def test_a_number_is_the_same_whenever_and_wherever_it_is_asked_for():
    first = Noise(seed=5).uniform(17, Purpose.ACCEPT, 2)
    Noise(seed=5).uniform(16, Purpose.ACCEPT, 2)
    assert Noise(seed=5).uniform(17, Purpose.ACCEPT, 2) == first
    # A change of these two would change the output of every seeded request: it needs a new version of the protocol.
    assert Noise(seed=5, sample_index=1, epoch=3).uniform(17, Purpose.RECOVER) == 0.4190800730928248
    assert Noise(seed=2**63 - 1).gumbel(9, torch.tensor([4]), 10).item() == pytest.approx(
        0.08221422206063099, rel=1e-14
    )


def test_every_part_of_the_key_changes_the_number():
    base = {"seed": 1, "sample_index": 0, "epoch": 0, "position": 3, "purpose": Purpose.ACCEPT, "index": 0}
    other = {"seed": 2, "sample_index": 1, "epoch": 1, "position": 4, "purpose": Purpose.RECOVER, "index": 1}

    def number(key: dict[str, object]) -> float:
        noise = Noise(key["seed"], key["sample_index"], key["epoch"])
        return noise.uniform(key["position"], key["purpose"], key["index"])

    numbers = [number(base), *(number({**base, part: other[part]}) for part in base)]
    assert len(set(numbers)) == len(numbers)


def test_numbers_are_distinct_across_seeds_positions_and_purposes():
    numbers = {
        Noise(seed, epoch=epoch).uniform(position, purpose, index)
        for seed in range(8)
        for epoch in range(4)
        for position in range(50)
        for purpose in Purpose
        for index in range(2)
    }
    assert len(numbers) == 8 * 4 * 50 * 3 * 2  # of 2^53, two of 9600 are equal once in 10^8 key choices


@pytest.mark.parametrize("along", ["seed", "position", "index"])
def test_uniform_numbers_are_uniform(along: str):
    if along == "seed":
        numbers = [Noise(seed).uniform(0, Purpose.ACCEPT) for seed in range(4000)]
    elif along == "position":
        numbers = [Noise(7).uniform(position, Purpose.ACCEPT) for position in range(4000)]
    else:
        numbers = [Noise(7).uniform(0, Purpose.ACCEPT, index) for index in range(4000)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-6  # fixed keys; one choice in a million would fail by luck


def test_neighbouring_positions_and_purposes_are_uncorrelated():
    pairs = [
        (noise.uniform(0, Purpose.ACCEPT), noise.uniform(1, Purpose.ACCEPT), noise.uniform(0, Purpose.RECOVER))
        for noise in map(Noise, range(4000))
    ]
    correlations = np.corrcoef(np.array(pairs).T) - np.eye(3)
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)  # five standard deviations of three fixed estimates


def test_gumbel_values_follow_the_gumbel_law_and_stay_within_their_bounds():
    values = Noise(11).gumbel(4, None, 20000)
    assert values.dtype == torch.float64
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-6  # fixed key; one in a million would fail by luck
    assert MIN_GUMBEL <= values.min() <= values.max() <= MAX_GUMBEL


def test_a_tokens_gumbel_value_depends_neither_on_the_vocabulary_size_nor_on_other_tokens():
    noise = Noise(3)
    small, large = noise.gumbel(6, None, 1000), noise.gumbel(6, None, 152064)
    assert torch.equal(small, large[:1000])
    some = torch.tensor([999, 5, 151000])
    assert torch.equal(noise.gumbel(6, some, 152064), large[some])
