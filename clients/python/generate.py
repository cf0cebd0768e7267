"""Streams a generation from a running specdec: python generate.py HOST:PORT PROMPT"""

import sys

import grpc

from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc


def main(endpoint: str, prompt: str) -> None:
    spec = common_pb2.GenerationSpec(
        chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=common_pb2.SamplingParameters(temperature=0),
        stop=common_pb2.StopCriteria(max_new_tokens=128),
    )
    with grpc.insecure_channel(endpoint) as channel:
        service = generation_pb2_grpc.GenerationServiceStub(channel)
        for response in service.Generate(generation_pb2.GenerateRequest(spec=spec)):
            event = response.event
            print(event.delta.text or event.finished.text, end="", flush=True)
            if event.HasField("finished"):
                reason = common_pb2.FinishReason.Name(event.finished.reason)
                print(flush=True)
                print(f"{reason}: {event.finished.usage.num_output_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
