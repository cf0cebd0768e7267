"""Counts what a client is sent against its tenant's share, on the way to its outbox. Knows no limits."""

from collections.abc import Callable

from orchestrator.outbox import FrameSink
from specdec.errors import SpecdecError
from specdec.messages import Delta, GenerationEvent, Started


class MeteredSink:
    """`charge` is told the tokens of each frame; those of the prompt, too, where `charges_prompt`."""

    def __init__(self, sink: FrameSink, charge: Callable[[int], None], *, charges_prompt: bool) -> None:
        self._sink = sink
        self._charge = charge
        self._charges_prompt = charges_prompt

    def put(self, frame: GenerationEvent) -> None:
        self._sink.put(frame)
        match frame:
            case Started() if self._charges_prompt:
                self._charge(frame.num_prompt_tokens)
            case Delta():
                self._charge(len(frame.token_ids))

    def close(self, error: SpecdecError | None = None) -> None:
        self._sink.close(error)
