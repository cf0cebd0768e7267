"""Coupled output is a function of target, prompt, parameters and seed: drafts cannot change a single id."""

from collections.abc import Sequence
from random import Random

import pytest

from specdec.decoding.acceptance import accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.params import AcceptanceRule, SamplingParams
from tests.statistical.exact_law import ToyTarget
from tests.statistical.trials import (
    Propose,
    Verifier,
    decode,
    fixed,
    least_likely_chain,
    nothing,
    sampled_chain,
    sampled_tree,
    without_probs,
)

TARGET = ToyTarget(vocabulary_size=9, num_padding=3)
PARAMS = SamplingParams(temperature=1.5, frequency_penalty=0.5, top_p=0.98, acceptance_rule=AcceptanceRule.COUPLED)
PROPOSERS: dict[str, Propose] = {
    "good chain": sampled_chain(TARGET, 4),
    "other chain": sampled_chain(ToyTarget(vocabulary_size=9, spread=3.0), 3),
    "tree": sampled_tree(TARGET, (3, 2, 2), with_replacement=False),
    "adversary": least_likely_chain(TARGET, 5),
    "padding": fixed(9, 10, 11),
}


def outputs(propose: Propose, num_tokens: int = 12) -> list[tuple[int, ...]]:
    verifier = Verifier(TARGET, PARAMS)
    return [decode(verifier, without_probs(propose), Noise(seed), Random(seed), num_tokens) for seed in range(25)]


@pytest.mark.parametrize("name", PROPOSERS)
def test_coupled_output_is_the_same_with_any_proposer(name: str):
    assert outputs(PROPOSERS[name]) == outputs(nothing)


def test_a_drafter_that_shares_the_noise_and_the_model_is_always_right_and_one_that_dodges_it_never():
    verifier = Verifier(TARGET, PARAMS)

    def peeking(noise: Noise, shift: int) -> Propose:
        def propose(committed: Sequence[int], random: Random) -> DraftTokens:
            token_ids: list[int] = []
            for _ in range(3):
                prefix = [*committed, *token_ids]
                scores = verifier.scores(prefix, DraftTokens())
                own = accept(PARAMS.rule, scores, DraftTokens(), noise, len(prefix)).next_token_id
                token_ids.append((own + shift) % 9)
            return DraftTokens(token_ids)

        return propose

    for seed, alone in enumerate(outputs(nothing, num_tokens=8)):
        noise = Noise(seed)
        assert decode(verifier, peeking(noise, shift=1), noise, Random(0), 8) == alone
        drafts = peeking(noise, shift=0)
        assert decode(verifier, drafts, noise, Random(0), 8) == alone
        assert tuple(drafts([0], Random(0)).token_ids) == alone[:3]


def test_different_seeds_give_different_outputs():
    assert len(set(outputs(nothing))) == 25  # 9^12 outputs: two of 25 are not equal by luck
