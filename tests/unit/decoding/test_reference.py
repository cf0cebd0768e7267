"""The reference loop gives what the target alone gives, and ends where an output ends."""

from collections.abc import Sequence

import pytest

from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.decoding.reference import ReferenceOutput, decode_speculatively
from specdec.params import AcceptanceRule, SamplingParams
from tests.statistical.exact_law import ToyTarget

TARGET = ToyTarget(vocabulary_size=8, num_padding=1)
COUPLED = SamplingParams(temperature=1.2, presence_penalty=0.3)
GREEDY = SamplingParams(temperature=0.0, presence_penalty=0.3)


def decode(propose, params=GREEDY, *, seed=0, max_new_tokens=16, end_token_ids=()) -> ReferenceOutput:
    return decode_speculatively(
        TARGET,
        propose,
        [1, 2],
        params,
        Noise(seed),
        max_new_tokens=max_new_tokens,
        end_token_ids=end_token_ids,
        vocabulary_size=8,
    )


def nothing(committed: Sequence[int]) -> DraftTokens:
    return DraftTokens()


def chain(committed: Sequence[int]) -> DraftTokens:
    return DraftTokens([3, 1, 8, 4])


def tree(committed: Sequence[int]) -> DraftTokens:
    return DraftTokens([0, 1, 2, 3, 4, 5, 6, 7, 1, 2], [-1] * 8 + [3, 5])


@pytest.mark.parametrize("params", [GREEDY, COUPLED])
@pytest.mark.parametrize("propose", [chain, tree])
def test_output_with_drafts_is_the_output_without(params, propose):
    for seed in range(5):
        alone = decode(nothing, params, seed=seed)
        drafted = decode(propose, params, seed=seed)
        assert drafted.token_ids == alone.token_ids
        assert alone.num_rounds == 16
        assert drafted.num_rounds <= 16


def test_a_right_draft_commits_all_its_tokens_and_a_bonus_token_in_one_round():
    alone = decode(nothing).token_ids
    right = decode(lambda committed: DraftTokens(alone[len(committed) - 2 :][:3]))
    assert right == ReferenceOutput(alone, num_rounds=4, num_draft_tokens=12, num_accepted_tokens=12)


def test_nothing_after_an_end_token_is_committed_wherever_in_a_draft_it_falls():
    alone = decode(nothing).token_ids
    end = alone[2]
    expected = alone[: alone.index(end) + 1]
    for num_tokens in range(5):
        output = decode(
            lambda committed, k=num_tokens: DraftTokens(alone[len(committed) - 2 :][:k]), end_token_ids=[end]
        )
        assert output.token_ids == expected


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5])
def test_no_more_than_max_new_tokens_are_committed(max_new_tokens):
    alone = decode(nothing).token_ids
    output = decode(lambda committed: DraftTokens(alone[len(committed) - 2 :][:4]), max_new_tokens=max_new_tokens)
    assert output.token_ids == alone[:max_new_tokens]


@pytest.mark.parametrize("rule", [AcceptanceRule.ONE_HOT])
def test_one_hot_meets_new_numbers_in_a_new_epoch_and_the_same_in_the_same(rule):
    params = SamplingParams(acceptance_rule=rule)

    def output(epoch: int) -> list[int]:
        arguments = {"max_new_tokens": 16, "end_token_ids": (), "vocabulary_size": 8}
        return decode_speculatively(TARGET, chain, [1], params, Noise(4, epoch=epoch), **arguments).token_ids

    assert output(1) == output(1)
    assert output(1) != output(2)
