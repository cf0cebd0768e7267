"""The draft model's cache and guesses, on a tiny random model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter_service.proposers import draft_model
from drafter_service.proposers.base import DraftLimits
from drafter_service.proposers.draft_model import MAX_CATCH_UP_TOKENS, DraftModelProposer, DraftModelSession
from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.model.loading import load_model
from specdec.model.runner import Rows
from specdec.params import AcceptanceRule, SamplingParams

PROMPT = (5, 9, 77, 31, 200, 14)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def proposer(tiny_model_dir: Path) -> DraftModelProposer:
    return DraftModelProposer(load_model(str(tiny_model_dir), device="cpu", dtype="float32"))


def new_session(
    proposer: DraftModelProposer,
    params: SamplingParams = GREEDY,
    rule: AcceptanceRule = AcceptanceRule.GREEDY,
    sample_index: int = 0,
) -> DraftModelSession:
    return proposer.new_session(params, rule, prompt_length=len(PROMPT), seed=7, sample_index=sample_index)


def greedy_continuation(proposer: DraftModelProposer, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What the model itself says, with a new cache for every token."""
    text = list(token_ids)
    for _ in range(num_tokens):
        runner = proposer.model.runner
        cache = runner.new_cache()
        for start in range(0, len(text), 32):
            logits = runner.forward([Rows(cache, text[start : start + 32])])[0][-1]
        cache.free()
        text.append(int(logits[: proposer.model.tokenizer.vocabulary_size].argmax()))
    return tuple(text[len(token_ids) :])


def test_a_greedy_draft_is_the_models_own_greedy_output(proposer: DraftModelProposer) -> None:
    assert new_session(proposer).propose(PROMPT, 5).token_ids == greedy_continuation(proposer, PROMPT, 5)


def test_after_a_full_accept_the_cache_is_one_token_short(proposer: DraftModelProposer) -> None:
    session = new_session(proposer)
    draft = session.propose(PROMPT, 4).token_ids
    assert session.cached_length == len(PROMPT) + 3  # the last draft token was never fed
    committed = [*PROMPT, *draft, 42]
    assert session.backlog(committed) == 1
    assert session.propose(committed, 1).token_ids == greedy_continuation(proposer, committed, 1)
    assert session.cached_length == len(committed)


def test_after_a_rejection_the_cache_keeps_the_accepted_tokens_alone(proposer: DraftModelProposer) -> None:
    session = new_session(proposer)
    draft = session.propose(PROMPT, 4).token_ids
    wrong = (draft[1] + 1) % 300
    committed = [*PROMPT, draft[0], wrong]
    assert session.propose(committed, 3).token_ids == greedy_continuation(proposer, committed, 3)


def test_after_an_advance_guesses_that_were_wrong_long_ago_leave_the_cache(proposer: DraftModelProposer) -> None:
    session = new_session(proposer)
    draft = session.propose(PROMPT, 4).token_ids
    committed = [*PROMPT, (draft[0] + 1) % 300, *draft[1:], 8, 9]  # longer than the cache, and other from its start
    assert session.propose(committed, 3).token_ids == greedy_continuation(proposer, committed, 3)


def test_a_cache_that_reaches_beyond_the_committed_tokens_is_used(proposer: DraftModelProposer) -> None:
    session = new_session(proposer)
    draft = session.propose(PROMPT, 5).token_ids
    committed = [*PROMPT, draft[0]]
    assert session.backlog(committed) == 0
    assert session.propose(committed, 4).token_ids == draft[1:]


histories = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(3, 310), max_size=3)), min_size=1, max_size=5
)


@pytest.mark.parametrize(
    ("params", "rule"),
    [(GREEDY, AcceptanceRule.GREEDY), (WARM, AcceptanceRule.COUPLED), (WARM, AcceptanceRule.ONE_HOT)],
)
@given(history=histories)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafts_equal_those_of_a_fresh_session_after_any_history(
    proposer: DraftModelProposer,
    params: SamplingParams,
    rule: AcceptanceRule,
    history: list[tuple[int, int, list[int]]],
) -> None:
    session = new_session(proposer, params, rule)
    committed = list(PROMPT)
    for num_draft, num_accepted, others in history:
        fresh = new_session(proposer, params, rule)
        draft = session.propose(committed, num_draft)
        fresh.warm(committed)
        assert draft.token_ids == fresh.propose(committed, num_draft).token_ids
        fresh.close()
        committed += [*draft.token_ids[:num_accepted], *others]  # accepted ones, a next token, tokens of an Advance
    session.close()


@pytest.mark.parametrize("sample_index", [0, 3])
def test_a_coupled_draft_is_the_sample_that_the_same_noise_draws(
    proposer: DraftModelProposer, sample_index: int
) -> None:
    session = new_session(proposer, SamplingParams(temperature=1.0), AcceptanceRule.COUPLED, sample_index)
    token_id = session.propose(PROMPT, 1).token_ids[0]
    runner, size = proposer.model.runner, proposer.model.tokenizer.vocabulary_size
    logits = runner.forward([Rows(runner.new_cache(), PROMPT)])[0][-1, :size]
    gumbel = Noise(7, sample_index).gumbel(len(PROMPT), None, size)
    assert token_id == int((torch.log_softmax(logits.double(), -1) + gumbel).argmax())


def test_a_rejection_draft_carries_the_distributions_it_was_drawn_from(proposer: DraftModelProposer) -> None:
    session = new_session(proposer, WARM, AcceptanceRule.REJECTION)
    proposal = session.propose(PROMPT, 6, DraftLimits(min_reach_prob=1.0))
    assert len(proposal.token_ids) == 6  # its length does not depend on what was sampled
    assert proposal.reach_probs == ()
    for token_id, distribution in zip(proposal.token_ids, proposal.draft_probs, strict=True):
        assert token_id in distribution.token_ids
        assert len(distribution.token_ids) <= 20
        assert sum(distribution.probs) == pytest.approx(1.0, abs=1e-4)


def test_rejection_samples_follow_the_probabilities_that_are_sent(proposer: DraftModelProposer) -> None:
    params = SamplingParams(temperature=1.5, top_k=4)
    session = new_session(proposer, params, AcceptanceRule.REJECTION)
    num_samples = 150
    counts: dict[int, int] = {}
    for _ in range(num_samples):
        proposal = session.propose(PROMPT, 1)
        counts[proposal.token_ids[0]] = counts.get(proposal.token_ids[0], 0) + 1
    expected = dict(zip(proposal.draft_probs[0].token_ids, proposal.draft_probs[0].probs, strict=True))
    assert set(counts) <= set(expected)
    chi_square = sum((counts.get(t, 0) - num_samples * p) ** 2 / (num_samples * p) for t, p in expected.items())
    assert chi_square < 30  # 3 degrees of freedom: a wrong failure happens once in 700,000


def test_an_unsure_draft_stops_early_and_a_sure_one_does_not(proposer: DraftModelProposer) -> None:
    stopped = new_session(proposer).propose(PROMPT, 6, DraftLimits(min_reach_prob=1.0))
    free = new_session(proposer).propose(PROMPT, 6)
    assert len(stopped.token_ids) == 1
    assert len(free.token_ids) == 6
    assert list(free.reach_probs) == sorted(free.reach_probs, reverse=True)


def test_drafting_stops_at_the_models_context_limit(proposer: DraftModelProposer) -> None:
    limit = proposer.context_limit
    text = [3 + i % 300 for i in range(limit + 5)]
    session = new_session(proposer)
    session.warm(text[: limit - 2])
    assert len(session.propose(text[: limit - 2], 8).token_ids) == 2
    assert session.propose(text[:limit], 8).token_ids == ()
    assert session.propose(text, 8).token_ids == ()
    assert session.backlog(text) == 0


def test_a_cache_far_behind_is_warmed_before_anything_is_proposed(proposer: DraftModelProposer) -> None:
    session = new_session(proposer)
    text = [3 + i % 200 for i in range(MAX_CATCH_UP_TOKENS + 10)]
    assert session.propose(text, 4).token_ids == ()
    session.warm(text)
    assert session.backlog(text) == 0
    assert session.propose(text, 4).token_ids == greedy_continuation(proposer, text, 4)


def test_model_steps_are_limited_by_what_the_policy_pays_for(proposer: DraftModelProposer) -> None:
    assert len(new_session(proposer).propose(PROMPT, 8, DraftLimits(max_model_tokens=2)).token_ids) == 2
    assert new_session(proposer).propose(PROMPT, 8, DraftLimits(max_model_tokens=0)).token_ids == ()


def test_closing_a_session_frees_its_cache(proposer: DraftModelProposer) -> None:
    before = proposer.kv_bytes
    session = new_session(proposer)
    session.propose(PROMPT, 2)
    assert proposer.kv_bytes > before
    session.close()
    assert proposer.kv_bytes == before


def test_where_other_sessions_take_the_memory_nothing_is_proposed_until_they_go(tiny_model_dir: Path) -> None:
    budget_bytes = 10 * 16 * 2 * 2 * 64 * 4  # ten blocks of the tiny model's keys and values, at the most
    model = load_model(str(tiny_model_dir), device="cpu", dtype="float32", kv_budget_bytes=budget_bytes)
    proposer = DraftModelProposer(model)
    room = 16 * model.runner.pool.num_blocks
    first, second = new_session(proposer), new_session(proposer)
    long_text = [token_id % 200 for token_id in range(room - 40)]
    first.warm(long_text)
    assert second.propose(PROMPT, 4).token_ids == greedy_continuation(proposer, PROMPT, 4)
    longer = [*PROMPT, *long_text[:60]]
    second.warm(longer)
    assert second.backlog(longer) == 0  # it could not catch up, so nobody should ask it to
    assert second.propose(longer, 4).token_ids == ()
    first.close()
    assert second.backlog(longer) > 0
    second.warm(longer)
    assert second.propose(longer, 4).token_ids == greedy_continuation(proposer, longer, 4)


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_where_no_token_is_possible_nothing_is_guessed(proposer: DraftModelProposer, rule: AcceptanceRule) -> None:
    """The verifier may go on there: it does not hold back an end of sequence that the request ignores."""
    temperature = 0.0 if rule is AcceptanceRule.GREEDY else 1.0
    ends = tuple(proposer.model.tokenizer.end_token_ids)
    params = SamplingParams(temperature=temperature, allowed_token_ids=ends, min_tokens=2, acceptance_rule=rule)
    session = new_session(proposer, params, rule)
    assert session.propose(PROMPT, 4).token_ids == ()
    assert session.propose([*PROMPT, *ends, *ends], 2).token_ids == ends * 2
    session.close()


@pytest.mark.parametrize("rule", [AcceptanceRule.GREEDY, AcceptanceRule.COUPLED])
def test_a_draft_counts_a_long_output_once_and_its_own_tokens_as_they_come(
    proposer: DraftModelProposer, monkeypatch: pytest.MonkeyPatch, rule: AcceptanceRule
) -> None:
    params = SamplingParams(
        temperature=0.0 if rule is AcceptanceRule.GREEDY else 1.0, repetition_penalty=3.0, frequency_penalty=2.0
    )
    made: list[TokenHistory] = []

    def history(*token_ids: Sequence[int]) -> TokenHistory:
        made.append(TokenHistory(*token_ids))
        return made[-1]

    monkeypatch.setattr(draft_model, "TokenHistory", history)
    committed = [*PROMPT, 8, 8, 9]
    draft = new_session(proposer, params, rule).propose(committed, 6).token_ids
    assert len(made) == 1
    for token_id in draft:
        assert new_session(proposer, params, rule).propose(committed, 1).token_ids == (token_id,)
        committed.append(token_id)
