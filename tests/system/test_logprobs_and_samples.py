"""Log-probabilities and samples through real processes: what they are equal to, and that nothing is left behind."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from specdec.cli.answer import Answer, collect, collect_samples
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.messages import Delta, PositionLogprobs, PromptLogprobs, Started
from specdec.params import FinishReason, GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria
from specdec.v1 import verifier_pb2
from tests.system.conftest import until_it_answers
from tests.system.hand_drafter import verifier_stub
from tests.unit.model.tiny import make_tiny_model_dir

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 60.0
NUM_TOKENS = 40
NUM_REAL_TOKENS = 320
PROMPT = tuple(60 + (7 * index) % 90 for index in range(70))
"""Longer than four blocks of the cache."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)
SPEC = GenerationSpec(
    PROMPT, sampling=SAMPLED, stop=StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True)
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """With a draft model that is often right and often wrong."""
    draft_model = make_tiny_model_dir(tmp_path_factory.mktemp("draft_model"), num_padding_rows=8, perturbation=0.02)
    options = ClusterOptions(
        model=str(tiny_model_dir),
        proposer="draft_model",
        draft_model=str(draft_model),
        dtype="float32",
        num_threads=1,
        num_draft_threads=1,
        start_timeout_s=120.0,
    )
    async with LocalCluster(options.validated()) as cluster:
        await until_it_answers(cluster)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[GenerationClient]:
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def without_drafts(spec: GenerationSpec) -> GenerationSpec:
    return dataclasses.replace(spec, speculation=SpeculationOptions(disabled=True))


def reference_logprobs(reference: AutoModelForCausalLM, token_ids: tuple[int, ...]) -> torch.Tensor:
    """[T, V]: row t is of the token at position t + 1; padding rows of the vocabulary left out."""
    with torch.inference_mode():
        logits = reference(torch.tensor([token_ids])).logits[0, :, :NUM_REAL_TOKENS]
    return torch.log_softmax(logits.double(), -1)


def assert_equal_to_reference(
    logprobs: tuple[PositionLogprobs, ...], expected: torch.Tensor, token_ids: tuple[int, ...], num_alternatives: int
) -> None:
    """`expected` has a row for each of token_ids."""
    assert [position.chosen.token_id for position in logprobs] == list(token_ids)
    for position, row in zip(logprobs, expected, strict=True):
        assert abs(position.chosen.logprob - float(row[position.chosen.token_id])) < 1e-4
        best = row.topk(num_alternatives).values.tolist()
        assert [token.logprob for token in position.alternatives] == pytest.approx(best, abs=1e-4)
        for token in position.alternatives:
            assert abs(token.logprob - float(row[token.token_id])) < 1e-4


async def idle(cluster: LocalCluster) -> None:
    """Until the verifier holds no session and no key."""
    channel, verifier = verifier_stub(cluster.endpoints["verifier"])
    async with channel, asyncio.timeout(DEADLINE_S):
        while True:
            response = await verifier.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=5.0)
            load = response.status.load
            if load.num_active_sessions == load.num_waiting_sessions == load.kv_used_bytes == 0:
                return
            await asyncio.sleep(0.02)


# --- Samples ---------------------------------------------------------------------------------------------------------


async def test_samples_differ_from_one_another_and_the_first_is_what_one_alone_would_be(
    client: GenerationClient,
) -> None:
    samples = await collect_samples(client.generate(dataclasses.replace(SPEC, num_samples=4)), 4)
    assert [len(sample.token_ids) for sample in samples] == [NUM_TOKENS] * 4
    assert len({sample.token_ids for sample in samples}) == 4
    alone = await collect(client.generate(SPEC))
    assert alone.token_ids == samples[0].token_ids
    assert alone.text == samples[0].text


async def test_samples_are_the_same_without_drafts_in_another_number_and_one_after_another(
    client: GenerationClient,
) -> None:
    spec = dataclasses.replace(SPEC, num_samples=4)
    samples = await collect_samples(client.generate(spec), 4)
    plain = await collect_samples(client.generate(without_drafts(spec)), 4)
    fewer = await collect_samples(client.generate(dataclasses.replace(spec, num_samples=2)), 2)
    assert [sample.token_ids for sample in plain] == [sample.token_ids for sample in samples]
    assert [sample.token_ids for sample in fewer] == [sample.token_ids for sample in samples[:2]]
    # Each resumed from its prompt alone: one session after another, each with its own index in the noise.
    for index, name in enumerate(samples[0].started.sample_session_ids):
        resumed = [event async for event in client.resume(name, (), SPEC)]
        token_ids = tuple(token for event in resumed if isinstance(event, Delta) for token in event.token_ids)
        assert token_ids == samples[index].token_ids


async def test_greedy_samples_are_identical_and_share_the_prompt(client: GenerationClient) -> None:
    prompt = (299, *PROMPT)  # seen by no other test
    spec = dataclasses.replace(SPEC, prompt=prompt, sampling=GREEDY, num_samples=2)
    one, other = await collect_samples(client.generate(spec), 2)
    assert one.token_ids == other.token_ids
    cached = [sample.finished.usage.num_cached_prompt_tokens for sample in (one, other)]
    assert min(cached) == 0
    assert max(cached) >= 64  # all full blocks of 71 tokens


async def test_cancelling_in_the_middle_ends_every_sample_and_frees_everything(
    client: GenerationClient, cluster: LocalCluster
) -> None:
    spec = dataclasses.replace(SPEC, num_samples=4, stop=StopCriteria(max_new_tokens=400, ignore_end_of_sequence=True))
    session_id = ""
    ended = []
    async for event in client.generate(spec):
        if isinstance(event, Started):
            session_id = event.session_id
        elif isinstance(event, Delta) and not ended:
            if session_id:
                assert await client.cancel(session_id)
                session_id = ""
        elif not isinstance(event, Delta | PromptLogprobs):
            ended.append(event)
    assert [event.reason for event in ended] == [FinishReason.CANCELLED] * 4
    assert sorted(event.sample_index for event in ended) == [0, 1, 2, 3]
    await idle(cluster)


async def test_a_client_that_leaves_in_the_middle_frees_every_sample(
    client: GenerationClient, cluster: LocalCluster
) -> None:
    spec = dataclasses.replace(SPEC, num_samples=4, stop=StopCriteria(max_new_tokens=400, ignore_end_of_sequence=True))
    stream = client.generate(spec)
    async for event in stream:
        if isinstance(event, Delta):
            break
    await stream.aclose()
    await idle(cluster)


# --- Log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_log_probabilities_are_the_same_to_the_bit_with_drafts_and_without(
    client: GenerationClient, sampling: SamplingParams
) -> None:
    spec = dataclasses.replace(SPEC, sampling=sampling, num_logprobs=5, num_prompt_logprobs=5)
    with_drafts = await collect(client.generate(spec))
    plain = await collect(client.generate(without_drafts(spec)))
    assert with_drafts.token_ids == plain.token_ids
    assert with_drafts.logprobs == plain.logprobs
    assert with_drafts.prompt_logprobs == plain.prompt_logprobs
    assert len(plain.logprobs) == NUM_TOKENS


@pytest.mark.parametrize("num_alternatives", [0, 3, 20])
async def test_log_probabilities_of_output_and_prompt_are_the_target_s_own_before_any_parameter(
    client: GenerationClient, reference: AutoModelForCausalLM, num_alternatives: int
) -> None:
    spec = dataclasses.replace(SPEC, num_logprobs=num_alternatives, num_prompt_logprobs=num_alternatives)
    answer: Answer = await collect(client.generate(spec))
    expected = reference_logprobs(reference, PROMPT + answer.token_ids)
    num_prompt = len(PROMPT)
    assert_equal_to_reference(answer.prompt_logprobs, expected[: num_prompt - 1], PROMPT[1:], num_alternatives)
    assert_equal_to_reference(answer.logprobs, expected[num_prompt - 1 : -1], answer.token_ids, num_alternatives)


async def test_log_probabilities_are_told_only_where_asked_for(client: GenerationClient) -> None:
    answer = await collect(client.generate(SPEC))
    assert (answer.logprobs, answer.prompt_logprobs) == ((), ())


async def test_each_sample_has_log_probabilities_of_its_own_and_the_prompt_has_them_once(
    client: GenerationClient, reference: AutoModelForCausalLM
) -> None:
    spec = dataclasses.replace(SPEC, num_samples=3, num_logprobs=2, num_prompt_logprobs=2)
    events = [event async for event in client.generate(spec)]
    told = [event for event in events if isinstance(event, PromptLogprobs)]
    assert sum(len(event.logprobs) for event in told) == len(PROMPT) - 1

    async def again() -> AsyncIterator[object]:
        for event in events:
            yield event

    for sample in await collect_samples(again(), 3):
        expected = reference_logprobs(reference, PROMPT + sample.token_ids)
        assert_equal_to_reference(sample.logprobs, expected[len(PROMPT) - 1 : -1], sample.token_ids, 2)


async def test_a_resumed_session_tells_log_probabilities_of_what_is_decided_from_then_on(
    client: GenerationClient,
) -> None:
    spec = dataclasses.replace(SPEC, num_logprobs=2, num_prompt_logprobs=2)
    whole = await collect(client.generate(spec, "resumed-with-logprobs"))
    received = whole.token_ids[:15]
    events = [event async for event in client.resume(whole.started.session_id, received, spec)]
    assert not any(isinstance(event, PromptLogprobs) for event in events)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert received + tuple(token for event in deltas for token in event.token_ids) == whole.token_ids
    assert tuple(position for event in deltas for position in event.logprobs) == whole.logprobs[15:]
