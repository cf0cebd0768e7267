"""What a runner promises: the model's own logits, and the same bits for a row however it came to run."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.errors import ModelLoadError
from specdec.model.block_pool import OutOfBlocksError
from specdec.model.kv_cache import KVCache
from specdec.model.runner import ModelRunner, Rows
from specdec.model.self_check import run_self_check
from tests.unit.model.tiny import Architecture, tiny_model

VOCABULARY_SIZE = 320
SHAPES: list[dict[str, object]] = [
    {"architecture": "llama", "heads": 6, "kv_heads": 2, "hidden_size": 96, "tie_word_embeddings": True},
    {"architecture": "qwen2", "heads": 4, "kv_heads": 2},
    {"architecture": "llama", "heads": 4, "kv_heads": 4, "attention_bias": True, "mlp_bias": True},
]


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY_SIZE) for _ in range(count)]


def make_runner(**shape: object) -> ModelRunner:
    runner = ModelRunner.from_hf_model(tiny_model(**shape), dtype=torch.float16)  # type: ignore[arg-type]
    check = run_self_check(runner)
    assert check.passed, check.detail
    return runner


@pytest.fixture(scope="module", params=range(len(SHAPES)), ids=lambda i: f"{SHAPES[i]['architecture']}{i}")
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(**SHAPES[request.param])


def feed(runner: ModelRunner, cache: KVCache, token_ids: Sequence[int], chunk: int) -> Tensor:
    """Logits of every row, the tokens given in chunks."""
    chunks = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return torch.cat([runner.forward([Rows(cache, ids)])[0] for ids in chunks])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_those_of_the_unswapped_model(shape: dict[str, object]) -> None:
    # Weights that float16 holds exactly, so that only the order of sums differs.
    reference = tiny_model(**shape).half().float()  # type: ignore[arg-type]
    token_ids = random_tokens(45)
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
        generated = reference.generate(torch.tensor([token_ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    runner = make_runner(**shape)
    cache = runner.new_cache()
    logits = feed(runner, cache, token_ids, 16)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)  # logits reach 30
    output = list(token_ids)
    while len(output) < len(generated):
        output.append(int(logits[-1].argmax()))
        logits = runner.forward([Rows(cache, output[-1:])])[0]
    assert output == generated


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 13, 31, 48])
def test_chunks_of_any_size_give_the_same_bits(runner: ModelRunner, chunk: int) -> None:
    token_ids = random_tokens(100)
    whole = feed(runner, runner.new_cache(), token_ids, 20)
    assert torch.equal(feed(runner, runner.new_cache(), token_ids, chunk), whole)


def test_a_session_alone_and_beside_three_others_has_the_same_bits(runner: ModelRunner) -> None:
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


def test_a_rolled_back_cache_gives_the_same_logits_as_a_fresh_cache(runner: ModelRunner) -> None:
    token_ids = random_tokens(90)
    expected = feed(runner, runner.new_cache(), token_ids, 9)
    cache = runner.new_cache()
    feed(runner, cache, token_ids[:60], 8)
    runner.forward([Rows(cache, random_tokens(12, seed=9))])  # a draft that is not accepted
    cache.rollback(60)
    assert torch.equal(feed(runner, cache, token_ids[60:], 11), expected[60:])


def test_ragged_accepts_of_none_two_and_all_in_one_batch_leave_every_session_exact(runner: ModelRunner) -> None:
    texts = [random_tokens(100, seed=seed) for seed in (11, 12, 13)]
    expected = [feed(runner, runner.new_cache(), text, 16) for text in texts]
    caches = [runner.new_cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        feed(runner, cache, text[:40], 8)
    for round_number in range(8):
        batch, accepts = [], []
        for session, (cache, text) in enumerate(zip(caches, texts, strict=True)):
            num_accepted = (0, 2, 4)[(session + round_number) % 3]
            draft = text[cache.length + 1 :][:4]
            guess = draft[:num_accepted] + [(token_id + 1) % VOCABULARY_SIZE for token_id in draft[num_accepted:]]
            batch.append(Rows(cache, [text[cache.length], *guess]))
            accepts.append(num_accepted)
        for session, logits in enumerate(runner.forward(batch)):
            base = caches[session].length - 5
            kept = 1 + accepts[session]
            assert torch.equal(logits[:kept], expected[session][base : base + kept])
            caches[session].rollback(base + kept)


TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6, 6)


@pytest.mark.parametrize("base", [0, 1, 61, 251, 315])
def test_every_row_of_a_tree_has_the_bits_of_the_chain_that_leads_to_it(runner: ModelRunner, base: int) -> None:
    prefix, node_ids = random_tokens(base, seed=2), random_tokens(len(TREE_PARENTS), seed=3)
    cache = runner.new_cache()
    if base:
        feed(runner, cache, prefix, 16)
    tree = runner.forward([Rows(cache, node_ids, TREE_PARENTS)])[0]
    assert cache.length == base + len(node_ids)
    for leaf in (4, 7, 8, 9):
        cache.rollback(base)
        path = path_to(leaf)
        chain = runner.forward([Rows(cache, [node_ids[node] for node in path])])[0]
        assert torch.equal(tree[path], chain)


def test_several_roots_follow_the_last_position_each(runner: ModelRunner) -> None:
    prefix = random_tokens(20)
    cache = runner.new_cache()
    feed(runner, cache, prefix, 10)
    siblings = runner.forward([Rows(cache, [7, 8, 9], (-1, -1, -1))])[0]
    for row, token_id in enumerate((7, 8, 9)):
        cache.rollback(20)
        assert torch.equal(runner.forward([Rows(cache, [token_id])])[0][0], siblings[row])


@pytest.mark.parametrize("leaf", [4, 7, 8, 9])
def test_a_compacted_tree_goes_on_as_if_its_path_had_been_a_chain(runner: ModelRunner, leaf: int) -> None:
    prefix, node_ids, after = (
        random_tokens(62, seed=2),
        random_tokens(len(TREE_PARENTS), seed=3),
        random_tokens(6, seed=4),
    )
    other = runner.new_cache()
    cache = runner.new_cache()
    feed(runner, cache, prefix, 16)
    # The tree runs beside another session, so that its rows do not start at the first row of the forward.
    runner.forward([Rows(other, random_tokens(3)), Rows(cache, node_ids, TREE_PARENTS)])
    path = path_to(leaf)
    cache.compact(len(prefix), path)
    assert cache.length == len(prefix) + len(path)
    chain = feed(runner, runner.new_cache(), prefix + [node_ids[node] for node in path] + after, 16)
    assert torch.equal(feed(runner, cache, after, 2), chain[-len(after) :])


def path_to(row: int) -> list[int]:
    path = [row]
    while TREE_PARENTS[path[0]] >= 0:
        path.insert(0, TREE_PARENTS[path[0]])
    return path


def test_only_the_logits_asked_for_are_given(runner: ModelRunner) -> None:
    token_ids = random_tokens(10)
    all_logits = runner.forward([Rows(runner.new_cache(), token_ids)])[0]
    one, two = runner.new_cache(), runner.new_cache()
    tail, none = runner.forward([Rows(one, token_ids, logits_from=7), Rows(two, token_ids, logits_from=10)])
    assert torch.equal(tail, all_logits[7:])
    assert none.shape == (0, VOCABULARY_SIZE)
    assert (one.length, two.length) == (10, 10)
    only_cached = runner.forward([Rows(two, [5], logits_from=1)])[0]
    assert only_cached.shape == (0, VOCABULARY_SIZE)


def test_beyond_256_keys_too_a_row_has_the_same_bits_however_far_its_session_reaches(runner: ModelRunner) -> None:
    token_ids = random_tokens(300)
    cache = runner.new_cache()
    expected = feed(runner, cache, token_ids, 48)
    cache.rollback(240)
    assert torch.equal(feed(runner, cache, token_ids[240:], 7), expected[240:])
    fresh = runner.new_cache()  # one that grows on the way
    feed(runner, fresh, token_ids[:240], 40)
    assert torch.equal(feed(runner, fresh, token_ids[240:], 25), expected[240:])


def test_the_number_of_threads_changes_no_bit() -> None:
    runner = make_runner(hidden_size=128, vocabulary_size=4096, heads=8)
    token_ids = random_tokens(96)
    threads = torch.get_num_threads()
    try:
        outputs = []
        for num_threads, chunk in ((1, 48), (3, 5), (2, 31)):
            torch.set_num_threads(num_threads)
            outputs.append(feed(runner, runner.new_cache(), token_ids, chunk))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_mostly_agrees_with_the_model_it_was_made_from(quantization: str) -> None:
    token_ids = random_tokens(200)
    runner = make_runner(layers=1)
    exact = feed(runner, runner.new_cache(), token_ids, 40)
    model = tiny_model(layers=1)
    quantised = ModelRunner.from_hf_model(model, quantization=quantization)  # type: ignore[arg-type]
    logits = feed(quantised, quantised.new_cache(), token_ids, 2)
    agreement = (logits.argmax(dim=1) == exact.argmax(dim=1)).float().mean()
    assert agreement > {"int8": 0.7, "int4": 0.5}[quantization]  # random weights; chance is 1 in 320
    assert quantised.numerics.weights_dtype == quantization


def test_bad_batches_are_refused_before_anything_changes(runner: ModelRunner) -> None:
    cache = runner.new_cache()
    feed(runner, cache, random_tokens(5), 5)
    bad: list[list[Rows]] = [
        [],
        [Rows(cache, [])],
        [Rows(cache, random_tokens(runner.max_rows + 1))],
        [Rows(cache, [1]), Rows(cache, [2])],
        [Rows(cache, [1, 2], logits_from=3)],
        [Rows(cache, [1, 2], parent_rows=(-1, 1))],
        [Rows(cache, [1, 2], parent_rows=(-1,))],
    ]
    for batch in bad:
        with pytest.raises(ValueError, match=r"\w"):
            runner.forward(batch)
    assert cache.length == 5


def test_a_prefix_that_was_adopted_has_the_bits_of_one_that_was_computed(runner: ModelRunner) -> None:
    text, other = random_tokens(90), random_tokens(30, seed=5)
    first, second = runner.new_cache(b"tenant"), runner.new_cache(b"tenant")
    expected = feed(runner, first, text, 13)
    first.publish(text)
    assert second.adopt_prefix(text) == 80
    assert torch.equal(feed(runner, second, text[80:], 3), expected[80:])
    # The first goes another way inside the shared blocks; the second does not notice.
    first.rollback(37)
    changed = feed(runner, first, other, 4)
    second.rollback(70)
    assert torch.equal(feed(runner, second, text[70:], 20), expected[70:])
    assert torch.equal(feed(runner, runner.new_cache(), text[:37] + other, 16)[37:], changed)
    for cache in (first, second):
        cache.free()


def test_logits_come_in_one_tensor_or_split_by_session(runner: ModelRunner) -> None:
    texts = [random_tokens(length, seed=length) for length in (4, 9, 1)]
    together = runner.forward_rows([Rows(runner.new_cache(), text, logits_from=1) for text in texts])
    split = runner.forward([Rows(runner.new_cache(), text, logits_from=1) for text in texts])
    assert together.dtype == torch.float32
    assert [len(logits) for logits in split] == [3, 8, 0]
    assert torch.equal(torch.cat(split), together)
    nothing = runner.forward_rows([Rows(runner.new_cache(), texts[0], logits_from=4)])
    assert nothing.shape == (0, VOCABULARY_SIZE)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_forward_of_hundreds_of_rows_has_the_bits_of_small_ones(num_threads: int) -> None:
    runner = make_runner(hidden_size=256, heads=2, kv_heads=1)  # head size 128
    text = random_tokens(runner.max_rows)
    expected = feed(runner, runner.new_cache(), text, 7)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(feed(runner, runner.new_cache(), text, runner.max_rows), expected)
        halves = [runner.new_cache(), runner.new_cache()]
        batch = [Rows(cache, text[: runner.max_rows // 2]) for cache in halves]
        for logits in runner.forward(batch):
            assert torch.equal(logits, expected[: runner.max_rows // 2])
    finally:
        torch.set_num_threads(threads)


def test_a_batch_that_finds_no_blocks_changes_nothing() -> None:
    model = tiny_model()
    runner = ModelRunner.from_hf_model(model, dtype=torch.float32, kv_budget_bytes=10 * 16 * 2 * 2 * 2 * 16 * 4)
    one, two = runner.new_cache(), runner.new_cache()
    num_blocks = runner.pool.num_blocks
    runner.forward([Rows(one, random_tokens(16 * num_blocks - 40))])
    free = runner.pool.num_free_blocks
    with pytest.raises(OutOfBlocksError):
        runner.forward([Rows(two, random_tokens(16)), Rows(one, random_tokens(41))])
    assert (one.length, two.length) == (16 * num_blocks - 40, 0)
    assert runner.pool.num_free_blocks >= free - 1  # a block kept for the next try is all that may stay
    runner.pool.check([one.block_table, two.block_table])


def test_a_self_check_leaves_the_pool_empty() -> None:
    runner = make_runner(layers=1)
    assert runner.pool.num_free_blocks == runner.pool.num_blocks
    runner.pool.check([])


def test_positions_beyond_the_context_are_refused() -> None:
    runner = make_runner(context_limit=64)
    cache = runner.new_cache()
    feed(runner, cache, random_tokens(64), 32)
    with pytest.raises(ValueError, match="context of 64"):
        runner.forward([Rows(cache, [1])])


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary"),
    ],
)
def test_models_that_could_not_be_exact_are_refused(
    architecture: Architecture, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelRunner.from_hf_model(tiny_model(architecture, **options), dtype=torch.float16)  # type: ignore[arg-type]
