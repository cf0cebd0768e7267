"""Scores are what the definitions of the sampling parameters say, at every row with that row's own history."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.processing import process_logits, require_possible_token, target_probs
from specdec.errors import InvalidParameterError
from specdec.params import SamplingParams
from tests.statistical.exact_law import next_token_law

V, N = 14, 12  # logit rows, and tokens without padding
END = {11}


def process(logits, params, *, prompt=(), outputs=None, suppressed=END, vocabulary_size=N):
    return process_logits(
        logits,
        params,
        prompt_token_ids=prompt,
        output_token_ids_per_row=[()] * len(logits) if outputs is None else outputs,
        suppressed_token_ids=suppressed,
        vocabulary_size=vocabulary_size,
    )


def some_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (num_rows, V)).astype(np.float32))


@st.composite
def sampling_params(draw):
    token_ids = st.integers(0, N - 2)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 5, N, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.5])),
        logit_bias=draw(st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3)),
        allowed_token_ids=draw(st.sampled_from([(), (0, 1, 2, 3, 4, 5), (1, 4, 7, 9, 10)])),
        banned_token_ids=draw(st.sampled_from([(), (3,), (0, 5, 7)])),
        min_tokens=draw(st.sampled_from([0, 2])),
    ).validated(N)


@given(
    params=sampling_params(),
    prompt=st.lists(st.integers(0, N - 1), max_size=4),
    outputs=st.lists(st.lists(st.integers(0, N - 1), max_size=5), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_combination_of_parameters_gives_the_law_of_the_definitions(params, prompt, outputs, seed):
    logits = some_logits(len(outputs), seed)
    scores = process(logits, params, prompt=prompt, outputs=outputs)
    for row, output in enumerate(outputs):
        law = next_token_law(logits[row, :N].tolist(), params, prompt, output, END)
        if params.temperature == 0:
            assert law[int(scores[row].argmax())] == 1
        else:
            # float32 logits of size 10 carry a relative error of 1e-6 into the probabilities, small temperatures more
            assert target_probs(scores)[row].tolist() == pytest.approx(law, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=V)])
def test_logits_are_left_untouched_where_no_parameter_is_on(params):
    logits = some_logits(3)
    scores = process(logits, params)
    assert scores.shape == (3, N)
    assert scores.data_ptr() == logits.data_ptr()


def test_logits_are_never_written_to():
    logits = some_logits(2)
    before = logits.clone()
    process(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5, repetition_penalty=2, banned_token_ids=(1,)))
    assert torch.equal(logits, before)


def test_padding_ids_have_no_scores():
    logits = some_logits(1)
    logits[0, N:] = 100.0
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.5),
    ):
        assert process(logits, params).shape == (1, N)


def test_padding_ids_in_a_history_are_passed_over():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    logits = some_logits(1)
    with_padding = process(logits, params, prompt=[1, N], outputs=[[2, N + 1]])
    assert torch.equal(with_padding, process(logits, params, prompt=[1], outputs=[[2]]))


def test_end_tokens_are_impossible_only_in_rows_below_min_tokens():
    scores = process(some_logits(3), SamplingParams(min_tokens=2), outputs=[[1], [1, 2], [1, 2, 3]])
    assert (scores[:, 11] == -math.inf).tolist() == [True, False, False]
    assert torch.isfinite(scores[:, :11]).all()


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5, logit_bias={0: -90, 2: -90, 4: -90})):
        scores = process(logits, params, suppressed=(), vocabulary_size=6)
        assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == [1, 3]


def test_top_k_counts_possible_tokens_alone():
    scores = process(some_logits(1), SamplingParams(top_k=8, allowed_token_ids=(2, 6)))
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == [2, 6]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_the_smallest_temperature_is_the_argmax_and_never_nan(temperature):
    logits = some_logits(2)
    probs = target_probs(process(logits, SamplingParams(temperature=temperature, top_p=0.9)))
    assert probs.max(dim=-1).values.tolist() == [1, 1]
    assert torch.equal(probs.argmax(dim=-1), logits[:, :N].argmax(dim=-1))


@pytest.mark.parametrize("penalty", [1e-300, 10.0])
def test_extreme_repetition_penalties_give_finite_probabilities(penalty):
    params = SamplingParams(repetition_penalty=penalty, temperature=0.5).validated()
    probs = target_probs(process(some_logits(1), params, prompt=range(N)))
    assert torch.isfinite(probs).all()


def test_top_p_of_a_large_vocabulary_is_the_smallest_set_that_reaches_it():
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (1, 50000)).astype(np.float32))
    scores = process(logits, SamplingParams(top_p=0.9), suppressed=(), vocabulary_size=50000)
    probs = torch.softmax(logits[0].double(), -1)
    kept = torch.isfinite(scores[0])
    assert probs[kept].sum() >= 0.9 > probs[kept].sum() - probs[kept].min()
    assert probs[kept].min() >= probs[~kept].max()


def test_a_request_that_leaves_no_token_is_refused():
    require_possible_token(SamplingParams(allowed_token_ids=(11, 3), min_tokens=1), END, N)
    require_possible_token(SamplingParams(allowed_token_ids=(11,)), END, N)
    with pytest.raises(InvalidParameterError) as caught:
        require_possible_token(SamplingParams(allowed_token_ids=(11,), min_tokens=1), END, N)
    assert caught.value.metadata["field"] == "allowed_token_ids"
    with pytest.raises(InvalidParameterError):
        require_possible_token(SamplingParams(banned_token_ids=tuple(range(11)), min_tokens=1), END, N)
