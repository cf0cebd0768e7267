"""Every kind of bad request, over the wire to a real system: a clear reason, and nobody else is hurt."""

import asyncio
import math
import time

import grpc
import pytest

from specdec.cli.client import GenerationClient
from specdec.errors import SpecdecError
from specdec.messages import Delta, Finished, Started
from specdec.params import ChatMessage, FinishReason, GenerationSpec, SamplingParams, StopCriteria
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc, verifier_pb2
from specdec.wire.channel import open_channel
from specdec.wire.convert import generation_spec_to_pb
from specdec.wire.interceptors import error_from_rpc
from tests.system.hand_drafter import verifier_stub

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

CONTEXT_LIMIT = 512
DEADLINE_S = 30.0


def request(prompt: str = "hello there", max_new_tokens: int = 4, **sampling: object) -> generation_pb2.GenerateRequest:
    spec = common_pb2.GenerationSpec(
        text=prompt,
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stop=common_pb2.StopCriteria(max_new_tokens=max_new_tokens),
    )
    for name, value in sampling.items():
        setattr(spec.sampling, name, value)
    return generation_pb2.GenerateRequest(spec=spec)


async def reason_of(cluster, message: generation_pb2.GenerateRequest) -> tuple[str, SpecdecError]:
    """The gRPC status and the error of a request that must fail."""
    async with open_channel(cluster.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(message, timeout=DEADLINE_S):
                pass
        return failure.value.code().name, error_from_rpc(failure.value)


async def generate(cluster, spec: GenerationSpec) -> tuple[list[int], Finished]:
    async with GenerationClient(cluster.endpoint, timeout_s=DEADLINE_S) as client:
        events = [event async for event in client.generate(spec)]
    assert isinstance(events[0], Started)
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids], events[-1]


def greedy(prompt="hello there", **stop: object) -> GenerationSpec:
    return GenerationSpec(prompt, sampling=SamplingParams(temperature=0.0), stop=StopCriteria(**stop))


async def test_a_prompt_without_anything_in_it_is_refused_in_each_of_its_forms(tiny_cluster):
    for spec in (
        common_pb2.GenerationSpec(),
        common_pb2.GenerationSpec(text=""),
        common_pb2.GenerationSpec(chat=common_pb2.ChatPrompt()),
        common_pb2.GenerationSpec(tokens=common_pb2.TokenPrompt()),
    ):
        code, error = await reason_of(tiny_cluster, generation_pb2.GenerateRequest(spec=spec))
        assert (code, error.reason) == ("INVALID_ARGUMENT", "EMPTY_PROMPT")


async def test_a_prompt_that_does_not_fit_the_context_is_refused_with_the_numbers(tiny_cluster):
    message = request()
    message.spec.tokens.token_ids.extend([7] * CONTEXT_LIMIT)
    code, error = await reason_of(tiny_cluster, message)
    assert (code, error.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert error.metadata["context_limit"] == str(CONTEXT_LIMIT)


@pytest.mark.parametrize("form", ["text", "chat"])
async def test_a_text_of_megabytes_is_refused_before_anybody_reads_it(tiny_cluster, form):
    megabytes = "x" * (10 << 20)
    spec = GenerationSpec(megabytes if form == "text" else (ChatMessage("user", megabytes),))
    began = time.monotonic()
    code, error = await reason_of(tiny_cluster, generation_pb2.GenerateRequest(spec=generation_spec_to_pb(spec)))
    assert (code, error.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert error.metadata["context_limit"] == str(CONTEXT_LIMIT)
    assert time.monotonic() - began < 5.0  # to encode it takes about ten seconds


async def test_a_conversation_of_more_turns_than_the_context_has_tokens_is_refused_before_anybody_reads_it(
    tiny_cluster,
):
    num_turns = 9000  # the context is shorter, and what the wire takes is longer
    turns = [common_pb2.ChatMessage(role="user")] * num_turns
    spec = common_pb2.GenerationSpec(chat=common_pb2.ChatPrompt(messages=turns))
    code, error = await reason_of(tiny_cluster, generation_pb2.GenerateRequest(spec=spec))
    assert (code, error.reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert f"{num_turns} turns" in error.message  # not tokens, which nobody counted


@pytest.mark.parametrize("token_id", [-1, 320, 2**31 - 1])
async def test_a_token_id_outside_the_vocabulary_is_refused(tiny_cluster, token_id):
    message = request()
    message.spec.tokens.token_ids.extend([7, token_id])
    assert (await reason_of(tiny_cluster, message))[1].reason == "TOKEN_OUT_OF_VOCABULARY"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e9),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e30),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("min_tokens", -1),
        ("seed", -1),
    ],
)
async def test_a_parameter_that_is_negative_not_finite_or_huge_is_refused_by_its_name(tiny_cluster, field, value):
    code, error = await reason_of(tiny_cluster, request(**{field: value}))
    assert (code, error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_PARAMETER", field)


@pytest.mark.parametrize("max_new_tokens", [0, -1, CONTEXT_LIMIT, 2**31 - 1])
async def test_an_output_limit_of_none_or_beyond_the_context_is_refused(tiny_cluster, max_new_tokens):
    _, error = await reason_of(tiny_cluster, request(max_new_tokens=max_new_tokens))
    assert (error.reason, error.metadata["field"]) == ("INVALID_PARAMETER", "max_new_tokens")


async def test_an_output_limit_of_one_gives_one_token(tiny_cluster):
    token_ids, finished = await generate(tiny_cluster, greedy(max_new_tokens=1, ignore_end_of_sequence=True))
    assert len(token_ids) == 1
    assert finished.reason is FinishReason.LENGTH
    assert finished.usage.num_output_tokens == 1


async def test_an_output_that_fills_the_context_to_its_last_position(tiny_cluster):
    prompt = tuple([7] * (CONTEXT_LIMIT - 6))
    token_ids, finished = await generate(tiny_cluster, greedy(prompt, max_new_tokens=6, ignore_end_of_sequence=True))
    assert len(token_ids) == 6
    assert finished.reason is FinishReason.LENGTH


async def test_an_unknown_model_is_refused(tiny_cluster):
    message = request()
    message.spec.model = "no-such-model"
    code, error = await reason_of(tiny_cluster, message)
    assert (code, error.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_logprobs", -1),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", -1),
        ("num_prompt_logprobs", 2**31 - 1),
        ("num_samples", 0),
        ("num_samples", 17),
        ("num_samples", 2**31 - 1),
    ],
)
async def test_more_samples_or_log_probabilities_than_are_offered_are_refused_by_name(tiny_cluster, field, value):
    message = request()
    setattr(message.spec, field, value)
    code, error = await reason_of(tiny_cluster, message)
    assert (code, error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "INVALID_PARAMETER", field)


@pytest.mark.parametrize(
    "stop",
    [
        {"stop_strings": [""]},
        {"stop_strings": ["x"] * 17},
        {"stop_strings": ["y" * 257]},
        {"stop_token_ids": [9_999]},
        {"stop_token_ids": [-1]},
    ],
)
async def test_stop_criteria_out_of_bounds_are_refused(tiny_cluster, stop):
    message = request()
    for field, values in stop.items():
        getattr(message.spec.stop, field).extend(values)
    _, error = await reason_of(tiny_cluster, message)
    assert (error.reason, error.metadata["field"]) == ("INVALID_PARAMETER", next(iter(stop)))


async def test_a_role_that_the_models_template_does_not_know_is_refused(tiny_cluster):
    spec = common_pb2.GenerationSpec(
        chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="", content="x")])
    )
    _, error = await reason_of(tiny_cluster, generation_pb2.GenerateRequest(spec=spec))
    assert error.reason in ("INVALID_PARAMETER", "MALFORMED_REQUEST")


async def test_a_message_over_the_size_limit_is_refused_and_the_connection_lives_on(tiny_cluster):
    code, _ = await reason_of(tiny_cluster, request("x" * (17 << 20)))
    assert code == "RESOURCE_EXHAUSTED"
    assert (await generate(tiny_cluster, greedy(max_new_tokens=2)))[0]


async def test_bad_requests_beside_a_good_one_do_not_change_it(tiny_cluster):
    spec = greedy((ChatMessage("user", "abc abc abc"),), max_new_tokens=48)
    undisturbed, _ = await generate(tiny_cluster, spec)
    bad = [request(temperature=math.nan), request(max_new_tokens=0), request("x" * (17 << 20)), request(top_k=-5)]
    outcome, *_ = await asyncio.gather(
        generate(tiny_cluster, spec), *(reason_of(tiny_cluster, message) for message in bad * 3)
    )
    assert outcome[0] == undisturbed


async def test_a_client_that_vanishes_in_mid_stream_frees_its_rows(tiny_cluster):
    channel, verifier = verifier_stub(tiny_cluster.endpoints["verifier"])
    async with channel, GenerationClient(tiny_cluster.endpoint, timeout_s=DEADLINE_S) as client:
        stream = client.generate(greedy(max_new_tokens=400, ignore_end_of_sequence=True))
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        async with asyncio.timeout(5.0):
            while True:
                status = (await verifier.GetStatus(verifier_pb2.VerifierServiceGetStatusRequest(), timeout=5.0)).status
                if status.load.num_active_sessions == 0 and status.load.kv_used_bytes == 0:
                    break
                await asyncio.sleep(0.02)
