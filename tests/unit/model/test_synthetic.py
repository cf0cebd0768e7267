"""A synthetic model promises what a real one does: the same bits for a row however it came to run."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.decoding.noise import Noise
from specdec.model.block_pool import BLOCK_SIZE, OutOfBlocksError
from specdec.model.kv_cache import KVCache
from specdec.model.runner import Rows
from specdec.model.synthetic import SyntheticRunner, check_synthetic
from specdec.model.synthetic_options import parse_synthetic
from specdec.model.synthetic_tokenizer import END_TOKEN_ID, FIRST_WORD_ID

VOCABULARY_SIZE = 512


def make_runner(options: str = "seed=3", num_blocks: int = 256) -> SyntheticRunner:
    return SyntheticRunner(
        parse_synthetic(f"synthetic:vocabulary={VOCABULARY_SIZE},context=2048,{options}"),
        kv_budget_bytes=num_blocks * BLOCK_SIZE * 16,
    )


@pytest.fixture(scope="module")
def runner() -> SyntheticRunner:
    return make_runner(num_blocks=4096)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY_SIZE) for _ in range(count)]


def feed(runner: SyntheticRunner, cache: KVCache, token_ids: Sequence[int], chunk: int) -> Tensor:
    """Logits of every row, the tokens given in chunks."""
    chunks = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return torch.cat([runner.forward([Rows(cache, ids)])[0] for ids in chunks])


@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 100])
def test_chunks_of_any_size_give_the_same_bits(runner: SyntheticRunner, chunk: int) -> None:
    token_ids = random_tokens(150)
    whole = feed(runner, runner.new_cache(), token_ids, 150)
    assert torch.equal(feed(runner, runner.new_cache(), token_ids, chunk), whole)


def test_a_session_alone_and_beside_three_others_has_the_same_bits(runner: SyntheticRunner) -> None:
    prompts = [random_tokens(length, seed=length) for length in (5, 64, 130, 71)]
    alone = [feed(runner, runner.new_cache(), prompt, 10) for prompt in prompts]
    caches = [runner.new_cache() for _ in prompts]
    together: list[list[Tensor]] = [[] for _ in prompts]
    step = itertools.cycle([1, 2, 4, 3, 7])
    while any(cache.length < len(prompt) for cache, prompt in zip(caches, prompts, strict=True)):
        running = [i for i, cache in enumerate(caches) if cache.length < len(prompts[i])]
        batch = [Rows(caches[i], prompts[i][caches[i].length :][: next(step)]) for i in running]
        for i, logits in zip(running, runner.forward(batch), strict=True):
            together[i].append(logits)
    for session, expected in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(session), expected)


def test_a_rolled_back_cache_gives_the_same_logits_as_a_fresh_cache(runner: SyntheticRunner) -> None:
    token_ids = random_tokens(90)
    expected = feed(runner, runner.new_cache(), token_ids, 9)
    cache = runner.new_cache()
    feed(runner, cache, token_ids[:60], 8)
    runner.forward([Rows(cache, random_tokens(12, seed=9))])  # a draft that is not accepted
    cache.rollback(45)
    assert torch.equal(feed(runner, cache, token_ids[45:], 7), expected[45:])


def test_a_path_of_a_tree_has_the_bits_of_the_chain_and_compacts_to_it(runner: SyntheticRunner) -> None:
    token_ids = random_tokens(60)
    expected = feed(runner, runner.new_cache(), token_ids, 60)
    cache = runner.new_cache()
    feed(runner, cache, token_ids[:30], 30)
    wrong = [(token_id + 1) % VOCABULARY_SIZE for token_id in token_ids]
    tree = [token_ids[30], wrong[31], token_ids[31], wrong[32], token_ids[32], token_ids[33]]
    logits = runner.forward([Rows(cache, tree, parent_rows=(-1, 0, 0, 2, 2, 4))])[0]
    path = [0, 2, 4, 5]
    assert torch.equal(logits[path], expected[30:34])
    assert not torch.equal(logits[1], expected[31])
    cache.compact(30, path)
    assert torch.equal(feed(runner, cache, token_ids[34:], 5), expected[34:])


def test_a_prefix_from_the_cache_gives_the_bits_of_a_prefix_computed(runner: SyntheticRunner) -> None:
    token_ids = random_tokens(100, seed=77)
    first = runner.new_cache(b"tenant")
    expected = feed(runner, first, token_ids, 50)
    first.publish(token_ids)
    second = runner.new_cache(b"tenant")
    assert second.adopt_prefix(token_ids) == 96
    assert torch.equal(feed(runner, second, token_ids[96:], 3), expected[96:])
    assert runner.new_cache(b"another tenant").adopt_prefix(token_ids) == 0


def test_rows_are_given_where_they_are_wanted(runner: SyntheticRunner) -> None:
    token_ids = random_tokens(20)
    expected = feed(runner, runner.new_cache(), token_ids, 20)
    batch = [
        Rows(runner.new_cache(), token_ids, logits_from=18),
        Rows(runner.new_cache(), token_ids, logits_from=20),
        Rows(runner.new_cache(), token_ids[:3]),
    ]
    assert torch.equal(runner.forward_rows(batch), torch.cat([expected[18:], expected[:3]]))
    none_wanted = runner.forward_rows([Rows(runner.new_cache(), token_ids, logits_from=20)])
    assert none_wanted.shape == (0, VOCABULARY_SIZE)


@pytest.mark.parametrize("spoilt", [0, 3, 40, 98])
def test_one_wrong_slot_near_or_far_changes_what_is_said(spoilt: int) -> None:
    runner = make_runner()
    token_ids, later = random_tokens(99), random_tokens(600, seed=2)
    sound, broken = runner.new_cache(), runner.new_cache()
    for cache in (sound, broken):
        feed(runner, cache, token_ids, 99)
    place = int(broken.slot_places(spoilt, spoilt + 1)[0])
    runner._slots[place] ^= 1
    assert not torch.equal(feed(runner, sound, later, 600), feed(runner, broken, later, 600))


def test_what_is_said_depends_on_the_seed_and_every_token() -> None:
    token_ids = random_tokens(40)
    said = feed(*_fresh("seed=3"), token_ids, 40)
    assert torch.equal(feed(*_fresh("seed=3"), token_ids, 40), said)
    assert not torch.equal(feed(*_fresh("seed=4"), token_ids, 40), said)
    changed = [*token_ids[:7], (token_ids[7] + 1) % VOCABULARY_SIZE, *token_ids[8:]]
    logits = feed(*_fresh("seed=3"), changed, 40)
    assert torch.equal(logits[:7], said[:7])
    assert not any(torch.equal(left, right) for left, right in zip(logits[7:], said[7:], strict=True))


def _fresh(options: str) -> tuple[SyntheticRunner, KVCache]:
    runner = make_runner(options)
    return runner, runner.new_cache()


# --- What is planted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_a_draft_model_wants_the_targets_token_as_often_as_planted(acceptance: float) -> None:
    num_positions = 2000
    token_ids = random_tokens(num_positions)
    target = feed(*_fresh("seed=3"), token_ids, num_positions)
    draft = feed(*_fresh(f"seed=3,acceptance={acceptance}"), token_ids, num_positions)
    num_equal = int((target.argmax(dim=1) == draft.argmax(dim=1)).sum())
    deviation = (num_positions * acceptance * (1 - acceptance)) ** 0.5
    assert abs(num_equal - num_positions * acceptance) <= 5 * deviation  # fixed prefix: one seed in a million fails


def test_under_the_rule_coupled_the_samples_agree_as_often_too() -> None:
    num_positions, acceptance = 1000, 0.7
    token_ids = random_tokens(num_positions)
    target = feed(*_fresh("seed=3"), token_ids, num_positions)
    draft = feed(*_fresh(f"seed=3,acceptance={acceptance}"), token_ids, num_positions)
    noise = Noise(11)
    num_equal = 0
    for position in range(num_positions):
        gumbel = noise.gumbel(position, None, VOCABULARY_SIZE)
        num_equal += int((target[position] + gumbel).argmax() == (draft[position] + gumbel).argmax())
    deviation = (num_positions * acceptance * (1 - acceptance)) ** 0.5
    # Where the models differ a sample may still be the same: it is, about once in 40 times.
    assert -5 * deviation < num_equal - num_positions * acceptance < 5 * deviation + 0.05 * num_positions


def test_an_output_ends_as_often_as_asked_and_never_by_itself() -> None:
    num_positions, end_rate = 2000, 0.05
    token_ids = random_tokens(num_positions)
    for planted in (0.0, end_rate):
        best = feed(*_fresh(f"end_rate={planted}"), token_ids, num_positions).argmax(dim=1)
        num_ends = int((best == END_TOKEN_ID).sum())
        assert abs(num_ends - num_positions * planted) <= 5 * (num_positions * planted * (1 - planted)) ** 0.5
        assert int(best[best != END_TOKEN_ID].min()) >= FIRST_WORD_ID


def test_the_favourite_has_most_of_the_probability_but_not_all() -> None:
    probs = feed(*_fresh("seed=3"), random_tokens(500), 500).softmax(dim=1).max(dim=1).values
    assert float(probs.min()) > 0.4
    assert float(probs.max()) < 0.97


# --- Time ------------------------------------------------------------------------------------------------------------


def test_a_forward_lasts_as_long_as_asked_and_sleeps_for_what_is_left() -> None:
    now, slept = [10.0], list[float]()

    def clock() -> float:
        now[0] += 0.001  # what the forward itself takes
        return now[0]

    options = parse_synthetic("synthetic:vocabulary=512,forward_ms=30,row_ms=2")
    runner = SyntheticRunner(options, kv_budget_bytes=1 << 20, clock=clock, sleep=slept.append)
    runner.forward_rows([Rows(runner.new_cache(), [1, 2, 3])])
    assert slept == [pytest.approx(0.035)]


def test_a_forward_that_took_longer_by_itself_does_not_sleep() -> None:
    slept = list[float]()
    ticks = itertools.count(0.0, 1.0)
    options = parse_synthetic("synthetic:vocabulary=512,forward_ms=30")
    runner = SyntheticRunner(options, kv_budget_bytes=1 << 20, clock=lambda: next(ticks), sleep=slept.append)
    runner.forward_rows([Rows(runner.new_cache(), [1])])
    assert slept == []


# --- Bounds ----------------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_before_anything_changes() -> None:
    runner = make_runner()
    cache = runner.new_cache()
    feed(runner, cache, random_tokens(10), 10)
    for batch in (
        [],
        [Rows(cache, [])],
        [Rows(cache, [1]), Rows(cache, [2])],
        [Rows(cache, [1, 2], parent_rows=(-1, 1))],
        [Rows(cache, [1], logits_from=2)],
        [Rows(cache, [1] * 2039)],
        [Rows(cache, [VOCABULARY_SIZE])],
        [Rows(cache, [-1])],
    ):
        with pytest.raises(ValueError, match=r"."):
            runner.forward_rows(batch)
        assert cache.length == 10


def test_a_full_pool_says_so_and_goes_on_when_blocks_are_given_back() -> None:
    runner = make_runner(num_blocks=4)
    first, second = runner.new_cache(), runner.new_cache()
    feed(runner, first, random_tokens(48), 48)
    with pytest.raises(OutOfBlocksError):
        runner.forward_rows([Rows(second, random_tokens(32))])
    assert (first.length, second.length) == (48, 0)
    first.free()
    runner.forward_rows([Rows(second, random_tokens(32))])
    runner.pool.check([second.block_table])


def test_a_forward_that_finds_no_room_for_one_session_keeps_none_for_another() -> None:
    runner = make_runner(num_blocks=8)
    first, second = runner.new_cache(), runner.new_cache()
    with pytest.raises(OutOfBlocksError):
        runner.forward_rows([Rows(first, random_tokens(64)), Rows(second, random_tokens(80))])
    assert first.length == 0
    assert runner.forward_rows([Rows(second, random_tokens(80))]).shape == (80, VOCABULARY_SIZE)


def test_numerics_are_those_of_what_is_said_not_of_how_long_it_takes() -> None:
    def fingerprint(options: str) -> str:
        return make_runner(options).numerics.fingerprint

    assert fingerprint("seed=1") == fingerprint("seed=1,forward_ms=5")
    assert len({fingerprint(options) for options in ("seed=1", "seed=2", "acceptance=0.5", "end_rate=0.5")}) == 4


def test_the_self_check_passes_and_leaves_no_block_behind(runner: SyntheticRunner) -> None:
    fresh = make_runner()
    check = check_synthetic(fresh)
    assert check.passed
    assert check.max_rows == fresh.max_rows
    fresh.pool.check([])
