"""The exact-law tests see what they should: the same helper, given wrong code or a lying drafter, finds it out."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from torch import Tensor

from specdec.decoding.acceptance import Acceptance, accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise, Purpose
from specdec.decoding.processing import target_probs
from specdec.messages import SparseDistribution
from specdec.params import AcceptanceRule, NextTokenKind, SamplingParams
from tests.statistical.exact_law import ToyTarget, chi_square_p_value, joint_law
from tests.statistical.trials import Accept, Propose, Verifier, fixed, sample_outputs, sampled_chain, sampled_tree
from tests.unit.decoding.plain_law import plain_draw

NUM_TRIALS = 1200
P_PASSED = 1e-4
P_CAUGHT = 1e-9  # well below the 1e-4 that right code passes with
TARGET = ToyTarget(vocabulary_size=4)
OTHER_DRAFTER = ToyTarget(vocabulary_size=4, num_padding=0, spread=2.0)
STRANGE_DRAFTER = ToyTarget(vocabulary_size=4, num_padding=0, spread=2.0, seed=1)


def p_value(
    propose: Propose,
    *,
    accept: Accept = accept,
    rule: AcceptanceRule = AcceptanceRule.REJECTION,
    with_draft_history: bool = True,
    **parameters: object,
) -> float:
    params = SamplingParams(acceptance_rule=rule, **parameters)
    verifier = Verifier(TARGET, params, with_draft_history=with_draft_history)
    outputs = sample_outputs(verifier, propose, num_tokens=3, num_trials=NUM_TRIALS, accept=accept)
    return chi_square_p_value(outputs, joint_law(TARGET, params, (0,), 3, set()))


def chain_rejection(*, leniency: float = 1.0, recover_from_target: bool = False) -> Accept:
    """The papers' rule on chains with full distributions, written plainly, so that it can be made wrong."""

    def accept_chain(
        rule: AcceptanceRule, scores: Tensor, draft: DraftTokens, noise: Noise, base_position: int
    ) -> Acceptance:
        probs = target_probs(scores).double().numpy()
        for node, token_id in enumerate(draft.token_ids):
            draft_probs = np.array(draft.draft_probs[node].probs)
            uniform = noise.uniform(base_position + node, Purpose.ACCEPT)
            if uniform < leniency * probs[node, token_id] / draft_probs[token_id]:
                continue
            residual = probs[node] if recover_from_target else np.maximum(probs[node] - draft_probs, 0)
            recovered = plain_draw(residual, noise.uniform(base_position + node, Purpose.RECOVER))
            return Acceptance(tuple(range(node)), recovered, NextTokenKind.RECOVERED)
        num_draft_tokens = len(draft.token_ids)
        bonus = plain_draw(probs[-1], noise.uniform(base_position + num_draft_tokens, Purpose.TARGET_SAMPLE))
        return Acceptance(tuple(range(num_draft_tokens)), bonus, NextTokenKind.BONUS)

    return accept_chain


def test_the_plainly_written_rule_passes_when_it_is_right():
    assert p_value(sampled_chain(OTHER_DRAFTER, 2, full=True), accept=chain_rejection()) > P_PASSED


@pytest.mark.parametrize("fault", [{"leniency": 1.25}, {"recover_from_target": True}])
def test_a_wrong_acceptance_is_caught(fault: dict[str, float | bool]):
    assert p_value(sampled_chain(OTHER_DRAFTER, 2, full=True), accept=chain_rejection(**fault)) < P_CAUGHT


def test_penalties_without_the_draft_tokens_in_the_history_are_caught():
    propose = sampled_chain(TARGET, 2, full=True)
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 1.0}
    assert p_value(propose, **penalties) > P_PASSED
    assert p_value(propose, with_draft_history=False, **penalties) < P_CAUGHT


def test_noise_that_serves_acceptance_and_recovery_alike_is_caught():
    class OneNumber(Noise):
        def uniform(self, position: int, purpose: Purpose, index: int = 0) -> float:
            return super().uniform(position, Purpose.ACCEPT, 0)

    def accept_with_one_number(
        rule: AcceptanceRule, scores: Tensor, draft: DraftTokens, noise: Noise, base_position: int
    ) -> Acceptance:
        return accept(rule, scores, draft, OneNumber(noise.seed), base_position)

    assert p_value(fixed(1, 2), accept=accept_with_one_number, rule=AcceptanceRule.ONE_HOT) < P_CAUGHT


def test_siblings_that_are_said_to_be_drawn_with_replacement_and_are_not_are_caught():
    honest = sampled_tree(STRANGE_DRAFTER, (3,), with_replacement=False)

    def lying(committed: Sequence[int], random: Random) -> DraftTokens:
        draft = honest(committed, random)
        return DraftTokens(draft.token_ids, draft.parent_indices, [draft.draft_probs[0]] * 3)

    assert p_value(honest) > P_PASSED
    assert p_value(lying) < P_CAUGHT


def test_a_drafter_that_lies_about_its_probabilities_biases_rejection_alone():
    """Why `rejection` is for trusted drafters: these tokens are certain, and said to be one of four."""

    def lying(committed: Sequence[int], random: Random) -> DraftTokens:
        return DraftTokens([1, 1], None, [SparseDistribution([], [0.25] * 4)] * 2)

    assert p_value(lying) < P_CAUGHT
    assert p_value(lying, rule=AcceptanceRule.ONE_HOT) > P_PASSED
    assert p_value(lying, rule=AcceptanceRule.COUPLED) > P_PASSED


def test_a_drafter_that_is_late_with_some_tokens_biases_rejection():
    """A target of (.5, .5) then gives (.25, .75), though every probability on the wire is true."""
    even = ToyTarget(vocabulary_size=2, num_padding=0, spread=0.0)
    params = SamplingParams(acceptance_rule=AcceptanceRule.REJECTION)

    def late_with_0(committed: Sequence[int], random: Random) -> DraftTokens:
        if random.random() < 0.5:
            return DraftTokens()  # token 0 was drawn and came too late: the verifier decodes alone
        return DraftTokens([1], None, [SparseDistribution([0, 1], [0.5, 0.5])])

    outputs = sample_outputs(Verifier(even, params), late_with_0, num_tokens=1, num_trials=1000)
    assert chi_square_p_value(outputs, {(0,): 0.25, (1,): 0.75}) > P_PASSED
    assert chi_square_p_value(outputs, {(0,): 0.5, (1,): 0.5}) < P_CAUGHT
