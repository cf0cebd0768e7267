"""A GenerationService that answers every request alike, so that a client alone is tested."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc


class ScriptedService(generation_pb2_grpc.GenerationServiceServicer):
    """Refuses temperatures below 0 as a server does; `requests` holds what came, `tenants` for whom."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.tenants: list[str] = []

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.tenants.append(dict(context.invocation_metadata()).get("specdec-tenant", ""))
        if request.spec.sampling.temperature < 0:
            await context.abort_with_status(rpc_status.to_status(_invalid_temperature()))
        spec = request.spec
        num_samples = spec.num_samples if spec.HasField("num_samples") else 1
        for event in _events(num_samples, with_logprobs=spec.HasField("num_logprobs")):
            yield generation_pb2.GenerateResponse(event=event)


def _events(num_samples: int, *, with_logprobs: bool) -> Iterator[generation_pb2.GenerationEvent]:
    """The last sample goes first, frame by frame."""
    names = [f"s.{index}" for index in range(num_samples)] if num_samples > 1 else []
    yield generation_pb2.GenerationEvent(
        started=generation_pb2.Started(
            session_id="s",
            seed=2**62,
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
            num_prompt_tokens=3,
            sample_session_ids=names,
        )
    )
    if with_logprobs:
        prompt_logprobs = common_pb2.PromptLogprobs(start_position=1, logprobs=[_logprobs(1), _logprobs(2)])
        yield generation_pb2.GenerationEvent(prompt_logprobs=prompt_logprobs)
    backwards = range(num_samples - 1, -1, -1)
    for index in backwards:
        yield generation_pb2.GenerationEvent(
            delta=generation_pb2.Delta(
                text="two wörds",
                token_ids=[5, 6],
                position=3,
                token_texts=["two ", "wörds"],
                logprobs=[_logprobs(5), _logprobs(6)] if with_logprobs else [],
                round=common_pb2.RoundStatistics(
                    num_draft_tokens=4,
                    num_accepted_tokens=1,
                    next_token_kind=common_pb2.NEXT_TOKEN_KIND_RECOVERED,
                ),
                sample_index=index,
            )
        )
    for index in backwards:  # its text is held back
        logprobs = [_logprobs(7)] if with_logprobs else []
        delta = generation_pb2.Delta(token_ids=[7], position=5, logprobs=logprobs, sample_index=index)
        yield generation_pb2.GenerationEvent(delta=delta)
    for index in backwards:
        yield generation_pb2.GenerationEvent(
            finished=generation_pb2.Finished(
                reason=common_pb2.FINISH_REASON_LENGTH,
                usage=common_pb2.Usage(num_prompt_tokens=3, num_output_tokens=2),
                speculative=common_pb2.SpeculativeStatistics(
                    num_rounds=1, num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1
                ),
                text=f" held back{index or ''}",
                sample_index=index,
            )
        )


def _logprobs(token_id: int) -> common_pb2.PositionLogprobs:
    chosen = common_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 8)
    return common_pb2.PositionLogprobs(chosen=chosen, alternatives=[common_pb2.TokenLogprob(token_id=9, logprob=-0.5)])


def _invalid_temperature() -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason="INVALID_PARAMETER", domain="specdec", metadata={"field": "temperature"})
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    details = [any_pb2.Any(), any_pb2.Any()]
    details[0].Pack(info)
    details[1].Pack(retry)
    return status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="must be in [0, 100]", details=details)


@contextlib.asynccontextmanager
async def scripted_service() -> AsyncIterator[tuple[ScriptedService, str]]:
    """The service and its endpoint."""
    service = ScriptedService()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
