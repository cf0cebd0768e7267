"""Many streams and several drafters on the real services and wire, over a synthetic target: no token may change."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from specdec.cli.answer import collect_samples
from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.messages import Delta, Finished
from specdec.params import GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria
from tests.system.conftest import START_TIMEOUT_S, until_it_answers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(360)]

NUM_SESSIONS = 32
NUM_TOKENS = 40
DEADLINE_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    room = ("--max-sessions", str(NUM_SESSIONS))
    options = ClusterOptions(
        model="synthetic:seed=5,forward_ms=50",  # longer than a draft takes: nobody waits for drafts that do not pay
        proposer="draft_model",
        draft_model="synthetic:seed=5,acceptance=0.7",
        num_drafters=2,
        num_threads=1,
        num_draft_threads=1,
        start_timeout_s=2 * START_TIMEOUT_S,
        extra_arguments={"verifier": room},
    )
    async with LocalCluster(options.validated()) as cluster:
        await until_it_answers(cluster)
        yield cluster


async def _answer(client: GenerationClient, number: int, *, drafts: bool) -> tuple[list[int], Finished]:
    """Every other session samples, by a seed of its own."""
    sampling = (
        SamplingParams(temperature=0.0) if number % 2 else SamplingParams(temperature=0.9, top_p=0.9, seed=number)
    )
    spec = GenerationSpec(
        f"request {number % 8}",  # some share their prompt
        sampling=sampling,
        stop=StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True),
        speculation=SpeculationOptions(disabled=not drafts),
    )
    token_ids: list[int] = []
    finished: Finished | None = None
    async for event in client.generate(spec):
        if isinstance(event, Delta):
            token_ids += event.token_ids
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None
    return token_ids, finished


async def _answers(cluster: LocalCluster, *, drafts: bool) -> list[tuple[list[int], Finished]]:
    async with asyncio.timeout(DEADLINE_S), GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        return await asyncio.gather(*(_answer(client, number, drafts=drafts) for number in range(NUM_SESSIONS)))


async def test_many_sessions_over_several_drafters_say_what_the_target_alone_says(cluster: LocalCluster) -> None:
    alone = await _answers(cluster, drafts=False)
    drafted = await _answers(cluster, drafts=True)
    assert [token_ids for token_ids, _ in drafted] == [token_ids for token_ids, _ in alone]
    assert all(len(token_ids) == NUM_TOKENS for token_ids, _ in alone)
    assert {tuple(token_ids) for token_ids, _ in alone[1::16]} == {tuple(alone[1][0])}  # one prompt, greedy: one output
    assert len({tuple(token_ids) for token_ids, _ in alone[0::8]}) == 4  # one prompt, sampled by four seeds


async def test_drafts_of_a_lone_session_are_accepted(cluster: LocalCluster) -> None:
    """Otherwise the claim above would hold for a system that never speculates. A starved drafter is tried again."""
    async with asyncio.timeout(DEADLINE_S), GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        while (await _answer(client, 1, drafts=True))[1].speculative.num_accepted_tokens == 0:
            pass


async def test_drafts_for_every_sample_are_accepted(cluster: LocalCluster) -> None:
    """A drafter that took another sample's noise would guess tokens that the target has no reason to draw."""
    spec = GenerationSpec(
        "several answers",
        sampling=SamplingParams(temperature=1.0, seed=3),
        stop=StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True),
        num_samples=3,
    )
    num_accepted = [0] * spec.num_samples
    async with asyncio.timeout(DEADLINE_S), GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        while min(num_accepted) == 0:
            samples = await collect_samples(client.generate(spec), spec.num_samples)
            for index, sample in enumerate(samples):
                num_accepted[index] += sample.finished.speculative.num_accepted_tokens


async def test_a_synthetic_model_answers_a_conversation_in_words(cluster: LocalCluster) -> None:
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        spec = GenerationSpec(
            "say something", sampling=SamplingParams(temperature=0.0), stop=StopCriteria(max_new_tokens=8)
        )
        text = "".join([event.text async for event in client.generate(spec) if isinstance(event, Delta | Finished)])
    words = text.split()
    assert len(words) == 8
    assert all(word.isascii() and word.isalpha() for word in words)
