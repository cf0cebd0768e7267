"""The output of every rule is distributed exactly as the target alone, whatever is drafted.

Each test compares the joint law of several tokens with the product law, by chi-square. Seeds are fixed, so a test that
passes always passes. P_MIN is a promise about the choice of seeds: if the code is right, one choice in ten thousand
fails.
`test_power.py` shows that wrong code does fail.
"""

import pytest

from specdec.params import AcceptanceRule, SamplingParams
from tests.statistical.exact_law import ToyTarget, chi_square_p_value, joint_law
from tests.statistical.trials import (
    Propose,
    Verifier,
    fixed,
    least_likely_chain,
    nothing,
    sample_outputs,
    sampled_chain,
    sampled_tree,
    without_probs,
)

P_MIN = 1e-4
NUM_TRIALS = 1000
TARGET = ToyTarget(vocabulary_size=4, num_padding=2)
GOOD_DRAFTER = ToyTarget(vocabulary_size=4, num_padding=1)  # the target itself, but for padding
OTHER_DRAFTER = ToyTarget(vocabulary_size=4, num_padding=0, spread=2.0, seed=1)  # prefers other tokens
SAMPLING_RULES = [AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT, AcceptanceRule.REJECTION]

EVERYTHING_ON = {
    "temperature": 1.3,
    "top_k": 5,
    "top_p": 0.97,
    "min_p": 0.02,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": {1: 0.7, 4: -0.5},
    "allowed_token_ids": (0, 1, 2, 3, 4, 5),
    "banned_token_ids": (5,),
    "min_tokens": 2,
}


def assert_exact(
    rule: AcceptanceRule,
    propose: Propose,
    *,
    target: ToyTarget = TARGET,
    num_tokens: int = 3,
    num_trials: int = NUM_TRIALS,
    end_ids: frozenset[int] = frozenset(),
    **parameters: object,
) -> None:
    params = SamplingParams(acceptance_rule=rule, **parameters).validated(target.vocabulary_size)
    verifier = Verifier(target, params, end_ids=end_ids)
    if rule is not AcceptanceRule.REJECTION:
        propose = without_probs(propose)
    outputs = sample_outputs(verifier, propose, num_tokens=num_tokens, num_trials=num_trials)
    law = joint_law(target, params, verifier.prompt, num_tokens, set(end_ids))
    assert chi_square_p_value(outputs, law) > P_MIN


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_without_a_draft(rule: AcceptanceRule):
    assert_exact(rule, nothing)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_with_chains_from_a_drafter_like_the_target(rule: AcceptanceRule):
    assert_exact(rule, sampled_chain(GOOD_DRAFTER, 3, full=True))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_with_chains_from_a_drafter_unlike_the_target(rule: AcceptanceRule):
    assert_exact(rule, sampled_chain(OTHER_DRAFTER, 2, temperature=0.7))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_with_an_adversarially_wrong_proposer(rule: AcceptanceRule):
    assert_exact(rule, least_likely_chain(TARGET, 3))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_with_drafts_of_padding_ids(rule: AcceptanceRule):
    assert_exact(rule, fixed(1, 4, 2))  # 4 is padding
    assert_exact(rule, fixed(5, 4), num_trials=500)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_with_drafts_of_probability_0_under_the_target(rule: AcceptanceRule):
    assert_exact(rule, sampled_chain(GOOD_DRAFTER, 2, full=True), banned_token_ids=(1,), top_k=2)
    assert_exact(rule, fixed(1, 1), banned_token_ids=(1,), num_trials=500)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("with_replacement", [True, False], ids=["with_replacement", "without_replacement"])
def test_with_sampled_trees(rule: AcceptanceRule, with_replacement: bool):
    assert_exact(rule, sampled_tree(OTHER_DRAFTER, (3, 2), with_replacement=with_replacement))


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT])
def test_with_a_tree_that_is_always_the_same(rule: AcceptanceRule):
    #       root ─ {0, 1 ─ {3 ─ 2, padding}, 2}
    assert_exact(rule, fixed(0, 1, 2, 3, 4, 2, parents=(-1, -1, -1, 1, 1, 3)))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_with_every_sampling_parameter_on(rule: AcceptanceRule, shape: str):
    """The penalties and min_tokens depend on history, so that each draft position has its own law."""
    target = ToyTarget(vocabulary_size=7)
    drafter = ToyTarget(vocabulary_size=7, num_padding=0)
    if shape == "chain":
        propose = sampled_chain(drafter, 3, full=True)
    else:
        propose = sampled_tree(drafter, (2, 2), with_replacement=False)
    assert_exact(rule, propose, target=target, end_ids=frozenset({2}), **EVERYTHING_ON)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_greedy_output_is_the_argmax_at_every_position_with_every_parameter_on(shape: str):
    target = ToyTarget(vocabulary_size=7)
    end_ids = frozenset({2})
    params = SamplingParams(**{**EVERYTHING_ON, "temperature": 0.0})
    chain = sampled_chain(ToyTarget(vocabulary_size=7), 3)
    propose = chain if shape == "chain" else sampled_tree(target, (3, 2), with_replacement=True)
    law = joint_law(target, params, (0,), 5, set(end_ids))
    outputs = sample_outputs(
        Verifier(target, params, end_ids=end_ids), without_probs(propose), num_tokens=5, num_trials=60
    )
    assert set(outputs) == set(law)
