"""Contract L2 at the engine, over a real model: no schedule changes a token or a log-probability.

Random sessions with prompts that begin alike, each with parameters of its own, over a cache that is too small for them,
few rows a step, drafts right and wrong of any length and shape, clients that leave: every session that stays gives what
it gives alone.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from specdec.messages import Commit, Opened, PromptLogprobs
from specdec.model.block_pool import BLOCK_SIZE
from specdec.model.runner import ModelRunner
from specdec.model.self_check import run_self_check
from specdec.params import AcceptanceRule, SamplingParams, StopCriteria
from tests.unit.model.tiny import END_TOKEN_ID, tiny_model
from tests.unit.verifier_service.harness import Bench, Drafter, HashRunner, LetterTokenizer, Session

VOCABULARY_SIZE = 320
NUM_BLOCKS = 14
MAX_STEPS = 3000


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tiny_model(vocabulary_size=VOCABULARY_SIZE)
    kv_bytes_per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes of a float32
    runner = ModelRunner.from_hf_model(
        model, dtype=torch.float16, kv_budget_bytes=NUM_BLOCKS * BLOCK_SIZE * kv_bytes_per_token
    )
    assert runner.pool.num_blocks == NUM_BLOCKS
    assert run_self_check(runner).passed
    yield runner
    torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    tenant: str
    sampling: SamplingParams
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    max_new_tokens: int

    def open(self, bench: Bench, session_id: str) -> Session:
        return bench.open(
            self.prompt,
            session_id=session_id,
            tenant=self.tenant,
            sampling=self.sampling,
            stop=StopCriteria(max_new_tokens=self.max_new_tokens, ignore_end_of_sequence=self.max_new_tokens % 2 == 0),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )


def random_request(generator: random.Random, starts: Sequence[tuple[int, ...]]) -> Request:
    start = generator.choice(starts)
    own = [generator.randrange(3, VOCABULARY_SIZE) for _ in range(generator.randrange(1, 20))]
    sampling = generator.choice(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=4),
            SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.6, seed=generator.randrange(1000)),
            SamplingParams(temperature=1.2, top_k=40, min_p=0.02, logit_bias={7: 2.0}, seed=generator.randrange(1000)),
        ]
    )
    return Request(
        (*start, *own),
        tenant=generator.choice(["", "", "other"]),
        sampling=sampling,
        num_logprobs=generator.choice([None, None, 2]),
        num_prompt_logprobs=generator.choice([None, None, None, 1]),
        max_new_tokens=generator.randrange(3, 28),
    )


def new_bench(runner: ModelRunner, **options) -> Bench:
    return Bench(runner=runner, tokenizer=LetterTokenizer(VOCABULARY_SIZE, END_TOKEN_ID), **options)


def alone(runner: ModelRunner, request: Request) -> Session:
    bench = new_bench(runner, prefix_caching=False, max_step_rows=256)
    session = request.open(bench, "alone")
    bench.run(session)
    return session


def random_draft(generator: random.Random, right: Sequence[int]) -> dict:
    """A chain or a tree around the right tokens, which may be right throughout, from some place on, or nowhere."""
    length = generator.randrange(0, 9)
    chain = [token if generator.random() < 0.85 else generator.randrange(VOCABULARY_SIZE) for token in right[:length]]
    if generator.random() < 0.7 or not chain:
        return {"token_ids": chain}
    token_ids: list[int] = []
    parents: list[int] = []
    at = -1
    for token_id in chain:
        for _ in range(generator.randrange(3)):
            token_ids.append(generator.randrange(VOCABULARY_SIZE))
            parents.append(at)
        token_ids.append(token_id)
        parents.append(at)
        at = len(token_ids) - 1
    return {"token_ids": token_ids, "parent_indices": tuple(parents)}


def told(session: Session) -> tuple[list[int], list, list]:
    logprobs = [one for commit in session.of(Commit) for one in commit.logprobs]
    prompt_logprobs = [one for event in session.of(PromptLogprobs) for one in event.logprobs]
    return session.token_ids, logprobs, prompt_logprobs


@pytest.mark.parametrize("seed", range(24))
def test_every_session_of_any_schedule_gives_what_it_gives_alone(runner, seed):
    generator = random.Random(seed)
    starts = [tuple(generator.randrange(3, VOCABULARY_SIZE) for _ in range(length)) for length in (0, 20, 52)]
    requests = [random_request(generator, starts) for _ in range(10)]
    expected = [alone(runner, request) for request in requests]
    bench = new_bench(
        runner,
        max_step_rows=generator.choice([3, 8, 24, 128]),
        max_sessions=generator.choice([3, 16]),
        max_waiting_sessions=16,
    )
    drafters = [Drafter(bench) for _ in range(2)]
    sessions: dict[int, Session] = {}
    attached: dict[int, Drafter] = {}
    left: set[int] = set()
    sent = 0
    for _ in range(MAX_STEPS):
        if len(sessions) == len(requests) and all(sessions[i].finished for i in set(sessions) - left):
            break
        if len(sessions) < len(requests) and generator.random() < 0.4:
            index = len(sessions)
            sessions[index] = requests[index].open(bench, f"s{index}")
            if generator.random() < 0.7:
                attached[index] = generator.choice(drafters)
                attached[index].attach(sessions[index])
        for index, drafter in attached.items():
            session = sessions[index]
            if index not in left and not session.finished and generator.random() < 0.6:
                at = len(session.token_ids) - (generator.random() < 0.1 and len(session.token_ids) > 0)
                guess = random_draft(generator, expected[index].token_ids[at:])
                drafter.draft(session, start_position=len(requests[index].prompt) + at, **guess)
                sent += 1
        if sessions and generator.random() < 0.02:
            index = generator.choice(list(sessions))
            bench.close(sessions[index])
            left.add(index)
        wake_at = bench.step()
        bench.now = max(bench.now + 0.001, wake_at or 0.0)
        bench.engine.check_cache()
    else:
        raise TimeoutError("the sessions did not finish")
    for index in set(sessions) - left:
        assert told(sessions[index]) == told(expected[index]), requests[index]
    assert runner.pool.num_free_blocks == NUM_BLOCKS
    answers = [messages for drafter in drafters for messages in drafter.answers().values()]
    assert [len(messages) for messages in answers] == [1] * sent


def test_small_caches_did_preempt(runner):
    """Else the test above would show less than it says."""
    generator = random.Random(1)
    requests = [random_request(generator, [()]) for _ in range(10)]
    requests = [dataclasses.replace(request, max_new_tokens=26, num_prompt_logprobs=None) for request in requests]
    bench = new_bench(runner, max_waiting_sessions=16)
    sessions = [request.open(bench, f"s{index}") for index, request in enumerate(requests)]
    bench.run(*sessions, max_steps=MAX_STEPS)
    assert bench.observer.num_preemptions > 0
    assert [session.token_ids for session in sessions] == [alone(runner, request).token_ids for request in requests]


def test_five_thousand_requests_with_clients_that_leave_at_random_leave_nothing_behind():
    generator = random.Random(0)
    bench = Bench(runner=HashRunner(num_blocks=40), max_sessions=8, max_waiting_sessions=32, max_step_rows=16)
    drafter = Drafter(bench)
    rules = [SamplingParams(temperature=0.0), SamplingParams(seed=1, acceptance_rule=AcceptanceRule.ONE_HOT)]
    running: list[Session] = []
    for index in range(5000):
        prompt = tuple(generator.randrange(1, 20) for _ in range(generator.choice([1, 3, 18])))
        session = bench.open(
            prompt,
            session_id=f"s{index}",
            tenant=f"t{index % 3}",
            sampling=generator.choice(rules),
            stop=StopCriteria(max_new_tokens=generator.randrange(1, 4)),
        )
        if session.of(Opened) and generator.random() < 0.3:
            drafter.attach(session)
        running.append(session)
        if generator.random() < 0.5:
            bench.step()
        if generator.random() < 0.3:
            bench.close(generator.choice(running[-8:]))
        running = running[-40:]
        for session in running[:-32]:
            bench.close(session)
    for session in running:
        bench.close(session)
    engine = bench.engine
    engine.check_cache()
    assert bench.runner.pool.num_free_blocks == 40
    load = engine.load()
    assert (load.num_active_sessions, load.num_waiting_sessions, load.num_attachments) == (0, 0, 0)
    assert not engine._open
    assert not engine._admission._waiting
    assert not engine._admission._prefills._running
    assert not engine._admission._prefills._following
    assert engine._shares.num_tenants == 0
    assert not drafter.stream.attachments
