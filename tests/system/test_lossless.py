"""The promise, over real processes: with any proposer and every parameter, speculation changes no token.

The draft model is the target with noise on its weights: it is often right and often wrong.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.messages import Delta, Finished
from specdec.params import AcceptanceRule, GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria
from tests.system.conftest import until_it_answers
from tests.unit.model.tiny import make_tiny_model_dir

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 60.0
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=5)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={40: 2.0, 41: -3.0},
    banned_token_ids=(50, 51),
    min_tokens=20,
    seed=9,
)
GREEDY_AND_PENALISED = dataclasses.replace(EVERYTHING, temperature=0.0)
ALLOWED_ONLY = SamplingParams(temperature=0.7, allowed_token_ids=tuple(range(60, 90)), seed=1)
PROMPT = "the cat sat on the mat, the cat sat on the mat, the cat"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngram", "draft_model", "stacked"])
async def cluster(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    draft_model = None
    if request.param != "ngram":
        folder = tmp_path_factory.mktemp("draft_model")
        draft_model = str(make_tiny_model_dir(folder, num_padding_rows=8, perturbation=0.02))
    options = ClusterOptions(
        model=str(tiny_model_dir),
        proposer=request.param,
        draft_model=draft_model,
        num_threads=1,
        num_draft_threads=1,
        start_timeout_s=120.0,
    )
    async with LocalCluster(options.validated()) as cluster:
        await until_it_answers(cluster)
        yield cluster


async def answer(
    cluster: LocalCluster, sampling: SamplingParams, *, drafts: bool, prompt: str = PROMPT, **stop: object
):
    """Token ids, text and last frame of one output."""
    stop_criteria = StopCriteria(**{"max_new_tokens": 48, "ignore_end_of_sequence": True, **stop})
    speculation = SpeculationOptions(disabled=not drafts)
    spec = GenerationSpec(prompt, sampling=sampling, stop=stop_criteria, speculation=speculation)
    token_ids: list[int] = []
    text = ""
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        async for event in client.generate(spec):
            if isinstance(event, Delta):
                token_ids += event.token_ids
            if isinstance(event, Delta | Finished):
                text += event.text
    assert isinstance(event, Finished)
    return token_ids, text, event


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, EVERYTHING, GREEDY_AND_PENALISED, ALLOWED_ONLY], ids=lambda s: f"t{s.temperature}"
)
async def test_speculation_changes_no_token_under_any_parameter(cluster, sampling):
    token_ids, text, _ = await answer(cluster, sampling, drafts=False)
    with_drafts = await answer(cluster, sampling, drafts=True)
    assert with_drafts[:2] == (token_ids, text)
    assert with_drafts[2].usage.num_output_tokens == len(token_ids)


async def test_drafts_are_really_verified_and_some_are_accepted(cluster):
    """Otherwise the claims above would hold for a system that never speculates."""
    one_token_only = SamplingParams(temperature=0.0, allowed_token_ids=(60,))
    # A drafter draws its own conclusions: it may leave a whole output alone where drafts did not pay before.
    for _ in range(20):
        speculative = (await answer(cluster, one_token_only, drafts=True, max_new_tokens=200))[2].speculative
        if speculative.num_accepted_tokens > 0:
            break
    assert speculative.num_accepted_tokens > 0
    assert speculative.num_rounds < 200


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
async def test_output_limits_are_met_exactly(cluster, max_new_tokens):
    expected = await answer(cluster, GREEDY, drafts=False, max_new_tokens=max_new_tokens)
    with_drafts = await answer(cluster, GREEDY, drafts=True, max_new_tokens=max_new_tokens)
    assert with_drafts[:2] == expected[:2]
    assert len(with_drafts[0]) == max_new_tokens


async def test_a_stop_string_cuts_both_at_the_same_character(cluster):
    _, text, _ = await answer(cluster, GREEDY, drafts=False)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    expected = await answer(cluster, GREEDY, drafts=False, stop_strings=(stop,))
    with_drafts = await answer(cluster, GREEDY, drafts=True, stop_strings=(stop,))
    assert with_drafts[:2] == expected[:2]
    assert expected[1] == text[: text.index(stop)]


async def test_sessions_beside_each_other_give_what_each_gives_alone(cluster):
    """Contract L2 through the whole system: greedy and coupled ids do not depend on the batch."""
    prompts = [PROMPT[: 10 + 7 * i] for i in range(6)]
    alone = [(await answer(cluster, SAMPLED, drafts=False, prompt=prompt))[0] for prompt in prompts]
    together = await asyncio.gather(*(answer(cluster, SAMPLED, drafts=True, prompt=prompt) for prompt in prompts))
    assert [outcome[0] for outcome in together] == alone


@pytest.mark.parametrize("rule", [AcceptanceRule.ONE_HOT, AcceptanceRule.REJECTION])
async def test_the_random_rules_run_through_the_whole_system(cluster, rule):
    """Their law is held by chi-square tests; here: lengths, ids and statistics add up."""
    sampling = SamplingParams(temperature=1.0, seed=4, acceptance_rule=rule)
    token_ids, _, finished = await answer(cluster, sampling, drafts=True)
    assert len(token_ids) == finished.usage.num_output_tokens == 48
    assert finished.speculative.num_refused_drafts == 0
