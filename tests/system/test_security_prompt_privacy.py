"""No prompt, output or token id is in any log, metric or error, whatever happens to a request: real roles at their most
talkative, a prompt that nobody could write by chance."""

import asyncio
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from specdec.cli.client import GenerationClient
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.processes import LocalCluster
from specdec.errors import SpecdecError
from specdec.messages import Delta, Finished, Started
from specdec.params import ChatMessage, GenerationSpec, Prompt, SamplingParams, StopCriteria
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from specdec.wire.channel import open_channel
from tests.system.conftest import until_it_answers

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),  # three processes start, on whatever else the machine does
]

DEADLINE_S = 30.0
START_TIMEOUT_S = 280.0
CONTEXT_LIMIT = 1024
VOCABULARY_SIZE = 32_000
WORD = "kumquatine"
CANARY = f"The {WORD} xylophonist owes 739-51-8264"
CANARY_IDS = (27_654, 26_543, 25_432, 24_321, 23_219)  # no free port has such a number
TARGET = f"synthetic:seed=1,vocabulary={VOCABULARY_SIZE},context={CONTEXT_LIMIT},forward_ms=2"
DRAFTER = f"{TARGET},acceptance=0.7"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    talkative = ("--log-level", "debug")
    options = ClusterOptions(
        model=TARGET,
        proposer="draft_model",
        draft_model=DRAFTER,
        num_threads=1,
        num_draft_threads=1,
        start_timeout_s=START_TIMEOUT_S,
        extra_arguments=dict.fromkeys(("verifier", "drafter", "orchestrator"), talkative),
    ).validated()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPECDEC_ORCHESTRATOR_FAILOVER_TIMEOUT_S", "2")  # no other verifier will come
        async with LocalCluster(options) as running:
            await until_it_answers(running)
            yield running


def spec(prompt: Prompt = CANARY, **stop: Any) -> GenerationSpec:
    return GenerationSpec(
        prompt, sampling=SamplingParams(temperature=0.0), stop=StopCriteria(**{"max_new_tokens": 24, **stop})
    )


class Told:
    """All that a system said: what its errors told its clients, its logs, its metrics."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.output_texts: list[str] = []
        self.output_ids: list[Sequence[int]] = []

    def add_error(self, error: Exception) -> None:
        self.errors.append(repr(error))
        if isinstance(error, SpecdecError):
            self.errors.append(error.message + repr(error.metadata))
        if isinstance(error, grpc.aio.AioRpcError):
            self.errors.append(repr(error.trailing_metadata()) + str(error.details()))

    def everything(self, cluster: LocalCluster) -> dict[str, str]:
        told = {path.name: path.read_text() for path in cluster.log_folder.iterdir()}
        for name, endpoint in cluster.metrics_endpoints.items():
            with contextlib.suppress(OSError):  # of one that was killed
                told[f"metrics of {name}"] = (
                    urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=5).read().decode()
                )
        return {**told, "errors": "\n".join(self.errors)}


def secrets_in(text: str, told: Told) -> list[str]:
    """What of prompts and outputs is in a text. A number counts unless it is a part of another, as in a time."""
    found = [word for word in (WORD, "xylophonist", "739-51-8264") if word.lower() in text.lower()]
    found += [str(one) for one in CANARY_IDS if re.search(rf"(?<![\d.]){one}(?!\d)", text)]
    found += [output[:16] for output in told.output_texts if output[:16] in text]
    return found + [
        repr(ids)
        for ids in told.output_ids
        if re.search(r"\D{1,3}".join(rf"\b{token_id}" for token_id in ids[:3]), text)
    ]


async def ask(client: GenerationClient, told: Told, asked: GenerationSpec, session_id: str = "") -> None:
    text, token_ids = "", list[int]()
    try:
        async for event in client.generate(asked, session_id):
            if isinstance(event, Delta):
                token_ids += event.token_ids
            if isinstance(event, Delta | Finished):
                text += event.text
    except SpecdecError as error:
        told.add_error(error)
    if len(text) >= 16:
        told.output_texts.append(text)
    if len(token_ids) >= 3:
        told.output_ids.append(token_ids)


def bad_requests() -> list[generation_pb2.GenerateRequest]:
    """Refused by different rooms for different reasons, each with the prompt in it."""

    def request(**fields: Any) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(spec=common_pb2.GenerationSpec(**fields))

    tokens = common_pb2.TokenPrompt(token_ids=CANARY_IDS)
    turn = common_pb2.ChatMessage(role=WORD, content=CANARY)
    return [
        request(text=CANARY * 100_000),
        request(text=CANARY, sampling=common_pb2.SamplingParameters(temperature=-1.0)),
        request(text=CANARY, stop=common_pb2.StopCriteria(stop_strings=[CANARY * 20])),
        request(text=CANARY, stop=common_pb2.StopCriteria(stop_token_ids=[VOCABULARY_SIZE + 1, *CANARY_IDS])),
        request(tokens=common_pb2.TokenPrompt(token_ids=[*CANARY_IDS, VOCABULARY_SIZE + 65_432])),
        request(tokens=common_pb2.TokenPrompt(token_ids=CANARY_IDS * 500)),
        request(tokens=tokens, model="no-such-model"),
        request(tokens=tokens, sampling=common_pb2.SamplingParameters(banned_token_ids=[-1, *CANARY_IDS])),
        request(chat=common_pb2.ChatPrompt(messages=[turn])),
    ]


async def test_a_prompt_is_in_no_log_metric_or_error_through_successes_and_refusals(cluster: LocalCluster) -> None:
    told = Told()
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        for prompt in (CANARY, CANARY_IDS, (ChatMessage("user", CANARY),)):
            await ask(client, told, spec(prompt))
        await ask(client, told, spec(stop_strings=(CANARY,)))
        await ask(client, told, spec(), "kept")
        for received in ((-5,), CANARY_IDS, (0, 1, 2)):
            with contextlib.suppress(SpecdecError):
                async for _ in client.resume("kept", received, spec(CANARY_IDS)):
                    pass
        leaving = client.generate(spec(max_new_tokens=900))
        await anext(leaving)
        await leaving.aclose()
    async with open_channel(cluster.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for bad in bad_requests():
            try:
                async for _ in stub.Generate(bad, timeout=DEADLINE_S):
                    pass
            except grpc.aio.AioRpcError as error:
                told.add_error(error)
        garbage = channel.unary_stream("/specdec.v1.GenerationService/Generate")
        try:
            await garbage(b"\x0a\xff" + CANARY.encode(), timeout=DEADLINE_S).read()
        except grpc.aio.AioRpcError as error:
            told.add_error(error)
    assert len(told.errors) >= 8
    assert told.output_texts
    assert told.output_ids
    said = told.everything(cluster)
    assert {"orchestrator.log", "verifier.log", "drafter-0.log", "metrics of orchestrator", "errors"} <= set(said)
    assert "request_failed" in said["orchestrator.log"]
    assert {name: found for name, text in said.items() if (found := secrets_in(text, told))} == {}


async def test_nor_when_roles_are_killed_under_it(cluster: LocalCluster) -> None:
    """Last: the cluster has no verifier afterwards."""
    told = Told()
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        streams = [client.generate(spec(prompt, max_new_tokens=900)) for prompt in (CANARY, CANARY_IDS)]
        for stream in streams:
            assert isinstance(await anext(stream), Started)
            assert isinstance(await anext(stream), Delta)
        os.kill(cluster.pids["drafter-0"], signal.SIGKILL)
        for stream in streams:
            await anext(stream)
        os.kill(cluster.pids["verifier"], signal.SIGKILL)
        for stream in streams:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    async for _ in stream:
                        pass
            except (SpecdecError, TimeoutError) as error:
                told.add_error(error)
        await ask(client, told, spec())
    assert told.errors
    said = told.everything(cluster)
    assert {name: found for name, text in said.items() if (found := secrets_in(text, told))} == {}


async def test_the_search_finds_what_it_looks_for() -> None:
    told = Told()
    told.output_ids, told.output_texts = [(11, 22, 33, 44)], ["some words that came out"]
    for leak in (CANARY, WORD.upper(), f"[7, {CANARY_IDS[0]}]", "token_ids=(11, 22, 33)", "some words that came"):
        assert secrets_in(f"a line {leak} more", told)
    assert not secrets_in(f"2026-01-01T00:00:00.{CANARY_IDS[0]}Z 1{CANARY_IDS[1]} 11 33 22", told)
