"""A batch of rounds is decided as each would be alone, by the plain law, whatever stands beside it."""

import dataclasses
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.decoding.draft import DraftTokens
from specdec.decoding.logprobs import token_logprobs
from specdec.decoding.noise import Noise
from specdec.decoding.processing import process_logits
from specdec.decoding.rounds import (
    NotANumberError,
    RoundDecision,
    RoundInput,
    TokenHistory,
    decide_rounds,
    walk_from_device,
    warm_up,
)
from specdec.messages import SparseDistribution
from specdec.params import AcceptanceRule, NextTokenKind, SamplingParams
from tests.unit.decoding.plain_law import plain_scores, plain_target_token, plain_walk

V, N = 150, 147  # logit rows and tokens: two blocks and a part of one
END = (5, 140)
PROMPT = (3, 8, 8, 60)
OUTPUT = (9, 9, 70, 140)


@st.composite
def sampling_params(draw):
    rule = draw(st.sampled_from(AcceptanceRule))
    token_ids = st.integers(0, N - 1)
    return SamplingParams(
        temperature=0.0 if rule is AcceptanceRule.GREEDY else draw(st.sampled_from([1.0, 0.4, 0.8, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 60, 146, N, 5000])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.7, 0.2, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 2.0, -2.0, 0.3])),
        logit_bias=draw(st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3)),
        allowed_token_ids=draw(st.sampled_from([(), (), tuple(range(0, N, 2)), (1, 4, 77, 146)])),
        banned_token_ids=draw(st.sampled_from([(), (), (3, 70)])),
        min_tokens=draw(st.sampled_from([0, 4, 6])),
        acceptance_rule=rule,
    ).validated(N)


@st.composite
def drafts(draw, rule: AcceptanceRule, likely: list[int]):
    num_nodes = draw(st.integers(0, 7))
    token_ids = draw(st.lists(st.sampled_from([*likely, 0, N - 1, V - 1]), min_size=num_nodes, max_size=num_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)] if draw(st.booleans()) else None
    draft_probs = None
    if rule is AcceptanceRule.REJECTION:
        draft_probs = []
        for token_id in token_ids:
            others = draw(st.lists(st.integers(0, V - 1), max_size=4, unique=True))
            ids = list(dict.fromkeys([token_id, *others]))
            weights = np.array([draw(st.integers(1, 5)) for _ in ids], dtype=np.float64)
            draft_probs.append(SparseDistribution(ids, (weights / weights.sum()).astype("f4").tolist()))
    return DraftTokens(token_ids, parents, draft_probs)


@st.composite
def round_inputs(draw, logits: np.ndarray):
    params = draw(sampling_params())
    likely = [int(token_id) for token_id in np.argsort(-logits[0, :N])[:3]]
    return RoundInput(
        params,
        Noise(draw(st.integers(0, 1000)), draw(st.integers(0, 2)), epoch=3),
        draw(st.integers(1, 50)),
        draw(drafts(params.rule, likely)),
        TokenHistory(draw(st.sampled_from([PROMPT, ()])), draw(st.sampled_from([OUTPUT, ()]))),
        draw(st.sampled_from([END, ()])),
        draw(st.sampled_from([None, 0, 3])),
    )


def some_logits(num_rows: int, seed: int, spread: float = 2.5) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, spread, (num_rows, V)).astype(np.float32)
    logits[:, N:] = 50.0  # padding
    return logits


def num_rows(round_: RoundInput) -> int:
    return 1 + len(round_.draft.token_ids)


def own_output(history: TokenHistory) -> list[int]:
    return list(Counter(dict(zip(*(part.tolist() for part in history.seen()), strict=True))).elements())


def plain_scores_of_rows(round_: RoundInput, logits: np.ndarray) -> np.ndarray:
    prompt = history_prompt(round_.history)
    paths = [[], *(round_.draft.path_to(node) for node in range(len(round_.draft.token_ids)))]
    return np.stack(
        [
            plain_scores(
                row[:N], round_.params, prompt, [*own_output(round_.history), *path], round_.suppressed_token_ids
            )
            for row, path in zip(logits, paths, strict=True)
        ]
    )


def history_prompt(history: TokenHistory) -> list[int]:
    return history.seen()[0].tolist()  # the penalties ask whether a token was seen, not where


# --- The law ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_round_is_decided_by_the_plain_law(data, seed):
    logits = some_logits(8, seed)
    round_ = data.draw(round_inputs(logits))
    rows = logits[: num_rows(round_)]
    [decision] = decide_rounds([round_], torch.from_numpy(rows), N)
    scores = plain_scores_of_rows(round_, rows)
    made = process_logits(
        torch.from_numpy(rows),
        round_.params,
        prompt_token_ids=history_prompt(round_.history),
        output_token_ids_per_row=[
            [*own_output(round_.history), *path]
            for path in ([], *(round_.draft.path_to(node) for node in range(len(round_.draft.token_ids))))
        ],
        suppressed_token_ids=round_.suppressed_token_ids,
        vocabulary_size=N,
    ).numpy()
    assert np.array_equal(np.isfinite(made), np.isfinite(scores))
    assert np.allclose(made[np.isfinite(made)], scores[np.isfinite(scores)], rtol=1e-6, atol=1e-6)  # float32
    walk = plain_walk(round_.params.rule, scores, round_.draft, round_.noise, round_.base_position)
    assert (list(decision.acceptance.accepted_node_indices), decision.acceptance.next_token_id) == walk


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 20.0])
@pytest.mark.parametrize("rule", [AcceptanceRule.GREEDY, AcceptanceRule.COUPLED])
def test_a_large_row_gives_the_token_of_the_plain_law(rule: AcceptanceRule, spread: float):
    logits = np.random.default_rng(1).normal(0, spread, (20, 50_001)).astype(np.float32)
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 1.0
    rounds = [
        RoundInput(SamplingParams(temperature=temperature), Noise(7), position, DraftTokens(), TokenHistory(()))
        for position in range(20)
    ]
    decided = [
        decision.acceptance.next_token_id for decision in decide_rounds(rounds, torch.from_numpy(logits), 50_000)
    ]
    plain = [plain_target_token(rule, row[:50_000], Noise(7), position) for position, row in enumerate(logits)]
    assert decided == plain


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 3000, "top_p": 0.5}, {"min_p": 0.02}])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_a_large_row_is_cut_as_by_sorting_it(params: dict[str, float], spread: float):
    logits = np.random.default_rng(2).normal(0, spread, (1, 50_000)).astype(np.float32)
    sampling = SamplingParams(temperature=0.9, **params)
    made = process_logits(
        torch.from_numpy(logits),
        sampling,
        prompt_token_ids=(),
        output_token_ids_per_row=[()],
        suppressed_token_ids=(),
        vocabulary_size=50_000,
    )
    kept = np.flatnonzero(np.isfinite(made[0].numpy()))
    plain = np.flatnonzero(np.isfinite(plain_scores(logits[0], sampling, (), (), ())))
    # float32 sums of 50,000 terms may differ on one token at the edge
    assert len(set(kept) ^ set(plain)) <= 1 + 1e-4 * len(plain)
    assert np.array_equal(kept[: len(plain) // 2], plain[: len(plain) // 2])


# --- One batch and many ----------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_round_is_decided_the_same_alone_and_in_any_batch_on_any_number_of_threads(data, seed):
    rounds = [data.draw(round_inputs(some_logits(8, seed))) for _ in range(data.draw(st.integers(2, 6)))]
    logits = [torch.from_numpy(some_logits(8, seed)[: num_rows(round_)]) for round_ in rounds]
    alone = [decide_rounds([round_], rows, N)[0] for round_, rows in zip(rounds, logits, strict=True)]
    assert decide_rounds(rounds, torch.cat(logits), N) == alone
    order = data.draw(st.permutations(range(len(rounds))))
    shuffled = decide_rounds([rounds[place] for place in order], torch.cat([logits[place] for place in order]), N)
    assert shuffled == [alone[place] for place in order]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert decide_rounds(rounds, torch.cat(logits), N) == alone
    finally:
        torch.set_num_threads(num_threads)


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rounds_on_a_device_are_decided_as_on_the_cpu(data, seed):
    rounds = [data.draw(round_inputs(some_logits(8, seed))) for _ in range(4)]
    rounds.append(RoundInput(SamplingParams(temperature=0.0), Noise(0), 4, DraftTokens([1, 2]), TokenHistory(())))
    logits = torch.cat([torch.from_numpy(some_logits(8, seed)[: num_rows(round_)]) for round_ in rounds])
    first_rows = np.cumsum([0, *(num_rows(round_) for round_ in rounds[:-1])]).tolist()
    walks = walk_from_device(rounds, first_rows, logits, N)
    decided = [decision.acceptance for decision in decide_rounds(rounds, logits, N)]
    assert walks == [(list(each.accepted_node_indices), each.next_token_id) for each in decided]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=-2.0, repetition_penalty=1.2, min_tokens=6),
    ],
)
def test_a_token_is_the_same_whether_it_is_decided_alone_or_within_a_draft_of_eight(params: SamplingParams):
    logits = torch.from_numpy(some_logits(9, 11))
    history = TokenHistory(PROMPT, OUTPUT)
    alone: list[RoundDecision] = []
    for depth in range(9):
        round_ = RoundInput(params, Noise(2), 8 + depth, DraftTokens(), history, END, 2)
        alone += decide_rounds([round_], logits[depth : depth + 1], N)
        history.append([alone[-1].acceptance.next_token_id])
    token_ids = [decision.acceptance.next_token_id for decision in alone]
    history = TokenHistory(PROMPT, OUTPUT)
    for right in range(9):
        draft = DraftTokens([*token_ids[:right], *(((token_id + 1) % N) for token_id in token_ids[right:8])])
        [decision] = decide_rounds([RoundInput(params, Noise(2), 8, draft, history, END, 2)], logits, N)
        assert list(decision.acceptance.accepted_node_indices) == list(range(min(right, 8)))
        assert decision.acceptance.next_token_id == token_ids[right]
        assert list(decision.logprobs) == [told.logprobs[0] for told in alone[: right + 1]]


# --- Faults that others had ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_penalties_meet_the_whole_history_and_every_draft_token_before_a_row(penalty: float):
    """With one flat row after another, a penalty alone decides: unseen tokens first, or the one seen most."""
    params = SamplingParams(temperature=0.0, frequency_penalty=penalty)
    logits = torch.zeros((6, 8))
    history = TokenHistory((), [0, 0, 0, 1, 1, 2])
    likely = [3, 4, 5, 6, 7] if penalty > 0 else [0] * 5
    [decision] = decide_rounds([RoundInput(params, Noise(0), 9, DraftTokens(likely), history)], logits, 8)
    assert decision.acceptance.accepted_node_indices == (0, 1, 2, 3, 4)
    assert decision.acceptance.next_token_id == (2 if penalty > 0 else 0)


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT])
def test_sampling_never_turns_greedy(rule: AcceptanceRule):
    logits = torch.zeros((1000, 16))
    params = SamplingParams(acceptance_rule=rule)
    rounds = [RoundInput(params, Noise(4), position, DraftTokens(), TokenHistory(())) for position in range(1000)]
    counts = Counter(decision.acceptance.next_token_id for decision in decide_rounds(rounds, logits, 16))
    assert stats.entropy(list(counts.values()), base=2) > 3.95  # of 4 bits; 1,000 samples lack 0.011 on average
    assert stats.chisquare([counts[token_id] for token_id in range(16)]).pvalue > 1e-6


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT])
def test_samples_of_one_request_are_independent(rule: AcceptanceRule):
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 0.5, (1, 4)).astype("f4")).expand(2000, 4).contiguous()
    params = SamplingParams(acceptance_rule=rule)
    pairs: Counter[tuple[int, int]] = Counter()
    tokens = []
    for sample_index in (0, 1):
        rounds = [
            RoundInput(params, Noise(9, sample_index), position, DraftTokens(), TokenHistory(()))
            for position in range(2000)
        ]
        tokens.append([decision.acceptance.next_token_id for decision in decide_rounds(rounds, logits, 4)])
    pairs.update(zip(*tokens, strict=True))
    table = [[pairs[first, second] for second in range(4)] for first in range(4)]
    assert stats.chi2_contingency(table).pvalue > 1e-6  # fixed seed; one in a million would fail by luck


def test_seeds_have_nothing_to_do_with_the_batch():
    logits = torch.zeros((64, 500))
    rounds = [RoundInput(SamplingParams(), Noise(seed), 3, DraftTokens(), TokenHistory(())) for seed in range(64)]
    tokens = [decision.acceptance.next_token_id for decision in decide_rounds(rounds, logits, 500)]
    Random(1).shuffle(rounds)
    shuffled = [decision.acceptance.next_token_id for decision in decide_rounds(rounds, logits, 500)]
    assert shuffled == [tokens[round_.noise.seed] for round_ in rounds]
    assert len(set(tokens)) > 50


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_accepted_tokens_have_the_log_probabilities_of_the_target_before_any_parameter(rule: AcceptanceRule):
    logits = torch.from_numpy(some_logits(4, 5))
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 0.5
    params = SamplingParams(temperature=temperature, top_k=3, frequency_penalty=0.5, acceptance_rule=rule)
    best = [int(row[:N].argmax()) for row in logits]
    draft_probs = [SparseDistribution((token_id,), (1.0,)) for token_id in best[:3]]
    draft = DraftTokens(best[:3], None, draft_probs if rule is AcceptanceRule.REJECTION else None)
    round_ = RoundInput(params, Noise(0), 4, draft, TokenHistory(PROMPT), (), 2)
    [decision] = decide_rounds([round_], logits, N)
    accepted = decision.acceptance.accepted_node_indices
    tokens = [*(best[node] for node in accepted), decision.acceptance.next_token_id]
    assert list(decision.logprobs) == token_logprobs(logits[: len(tokens)], tokens, 2, N)
    assert all(math.isfinite(told.chosen.logprob) and told.chosen.logprob < 0 for told in decision.logprobs)


def test_log_probabilities_are_there_for_those_who_asked_and_as_many_as_they_asked_for():
    logits = torch.from_numpy(some_logits(3, 6))
    base = RoundInput(SamplingParams(), Noise(0), 4, DraftTokens(), TokenHistory(()))
    wanted = [None, 0, 4]
    rounds = [dataclasses.replace(base, num_logprobs=number) for number in wanted]
    decisions = decide_rounds(rounds, logits, N)
    assert [[len(told.alternatives) for told in decision.logprobs] for decision in decisions] == [[], [0], [4]]


# --- Bounds ----------------------------------------------------------------------------------------------------------


def test_a_round_without_a_draft_has_a_plain_token():
    round_ = RoundInput(SamplingParams(temperature=0.0), Noise(0), 1, DraftTokens(), TokenHistory(()))
    [decision] = decide_rounds([round_], torch.from_numpy(some_logits(1, 0)), N)
    assert decision.acceptance.next_token_kind is NextTokenKind.PLAIN


def test_no_rounds_are_decided_at_once():
    assert decide_rounds([], torch.empty((0, V)), N) == []


def test_rows_that_are_not_those_of_the_rounds_raise():
    round_ = RoundInput(SamplingParams(), Noise(0), 1, DraftTokens([1]), TokenHistory(()))
    with pytest.raises(ValueError, match="rows"):
        decide_rounds([round_], torch.zeros((3, V)), N)


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_logits_that_are_not_finite_name_the_rounds_that_have_them(rule: AcceptanceRule, top_p: float, number: float):
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 0.5
    params = SamplingParams(temperature=temperature, top_p=top_p, acceptance_rule=rule)
    round_ = RoundInput(params, Noise(0), 1, DraftTokens(), TokenHistory(()))
    logits = torch.from_numpy(some_logits(4, 0))
    logits[2] = number
    with pytest.raises(NotANumberError) as caught:
        decide_rounds([round_] * 4, logits, N)
    assert caught.value.rounds == [2]


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_one_logit_that_is_no_number_is_found_in_its_row(rule: AcceptanceRule, number: float):
    """Of either sign: what processors make of infinity less infinity is negative."""
    params = SamplingParams(temperature=0.0 if rule is AcceptanceRule.GREEDY else 1.0, acceptance_rule=rule)
    logits = torch.from_numpy(some_logits(2, 0))
    logits[1, 77] = number
    with pytest.raises(NotANumberError):
        decide_rounds([RoundInput(params, Noise(0), 1, DraftTokens(), TokenHistory(()))] * 2, logits, N)


def test_a_draft_longer_than_the_vocabulary_is_penalised_to_its_end():
    token_ids = [7 * index % 64 for index in range(200)]
    logits = torch.zeros((201, 64))
    logits[torch.arange(201), torch.tensor([*token_ids, 5])] = 100.0  # a penalty of 0.1 for each changes nothing
    params = SamplingParams(temperature=0.0, frequency_penalty=0.1)
    [decision] = decide_rounds([RoundInput(params, Noise(0), 1, DraftTokens(token_ids), TokenHistory(()))], logits, 64)
    assert decision.acceptance.accepted_node_indices == tuple(range(200))
    assert decision.acceptance.next_token_id == 5


def test_penalties_over_a_long_output_touch_the_tokens_seen_alone():
    """32,768 output tokens, 1,000 of them distinct: the second round counts only what is new."""
    tokens = np.random.default_rng(0).integers(0, 1000, 32_768).tolist()
    history = TokenHistory(tokens[:100], tokens)
    token_ids, _ = history.seen()
    assert len(token_ids) == 1000
    history.append([5, 5, 1001])
    params = SamplingParams(temperature=0.0, frequency_penalty=-0.001)
    round_ = RoundInput(params, Noise(0), 40_000, DraftTokens(), history)
    [decision] = decide_rounds([round_], torch.zeros((1, 2000)), 2000)
    counts = Counter([*tokens, 5, 5, 1001])
    assert decision.acceptance.next_token_id == min(counts, key=lambda token_id: (-counts[token_id], token_id))
    assert history.count(1001) == 1


def test_the_first_round_after_warming_up_needs_nothing_new():
    warm_up(N)
    warm_up(64)
