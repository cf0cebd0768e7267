"""Log-probabilities are the target's own, of every token that is told, and the same bits wherever a row stands."""

import math

import numpy as np
import pytest
import torch

from specdec.decoding.logprobs import token_logprobs


def some_logits(num_rows: int, num_tokens: int, spread: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(num_tokens).normal(0, spread, (num_rows, num_tokens)).astype("f4"))


@pytest.mark.parametrize("vocabulary_size", [1, 5, 64, 65, 1000, 40000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_they_are_those_of_the_softmax_in_double_precision(vocabulary_size: int, spread: float):
    logits = some_logits(3, vocabulary_size + 3, spread)
    logits[:, vocabulary_size:] = 90.0  # padding
    expected = torch.log_softmax(logits[:, :vocabulary_size].double(), dim=-1)
    order = torch.sort(-logits[:, :vocabulary_size], dim=-1, stable=True).indices
    told = token_logprobs(logits, [0, vocabulary_size // 2, vocabulary_size - 1], 20, vocabulary_size)
    for row, token_id in enumerate([0, vocabulary_size // 2, vocabulary_size - 1]):
        assert told[row].chosen.token_id == token_id
        # the sum of 40,000 terms carries some 1e-13
        assert told[row].chosen.logprob == pytest.approx(expected[row, token_id].item(), abs=1e-12)
        assert [other.token_id for other in told[row].alternatives] == order[row, :20].tolist()
        for other in told[row].alternatives:
            assert other.logprob == pytest.approx(expected[row, other.token_id].item(), abs=1e-12)


def test_the_lowest_ids_come_first_among_equals():
    logits = torch.zeros((1, 300))
    logits[0, [7, 130, 200]] = 2.0
    [told] = token_logprobs(logits, [7], 5, 300)
    assert [other.token_id for other in told.alternatives] == [7, 130, 200, 0, 1]


def test_no_alternatives_are_told_where_none_are_wanted():
    [told] = token_logprobs(some_logits(1, 50), [4], 0, 50)
    assert told.alternatives == ()
    assert math.isfinite(told.chosen.logprob)


def test_padding_has_no_probability():
    [told] = token_logprobs(some_logits(1, 50), [49], 0, 48)
    assert told.chosen.logprob == -math.inf


def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads():
    logits = some_logits(9, 5000)
    together = token_logprobs(logits, [3] * 9, 4, 4990)
    assert [token_logprobs(logits[row : row + 1], [3], 4, 4990)[0] for row in range(9)] == together
    assert token_logprobs(logits, [3] * 4, 4, 4990, rows=[8, 2, 2, 0]) == [together[row] for row in (8, 2, 2, 0)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 if num_threads > 1 else 2)
    try:
        assert token_logprobs(logits, [3] * 9, 4, 4990) == together
    finally:
        torch.set_num_threads(num_threads)


def test_as_many_tokens_as_rows_are_needed():
    with pytest.raises(ValueError, match="rows"):
        token_logprobs(some_logits(2, 10), [1], 0, 10)
