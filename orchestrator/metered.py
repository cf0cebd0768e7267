"""Notes what a client is sent, on the way to its outbox. Knows nothing of what the notes are for."""

from collections.abc import Callable

from orchestrator.outbox import FrameSink
from specdec.errors import SpecdecError
from specdec.messages import Delta, GenerationEvent, Started


class MeteredSink:
    """`on_delta` is told of each, `on_prompt` of the number of the prompt's tokens."""

    def __init__(
        self, sink: FrameSink, *, on_prompt: Callable[[int], None] | None, on_delta: Callable[[Delta], None]
    ) -> None:
        self._sink = sink
        self._on_prompt = on_prompt
        self._on_delta = on_delta

    def put(self, frame: GenerationEvent) -> None:
        self._sink.put(frame)
        match frame:
            case Started() if self._on_prompt is not None:
                self._on_prompt(frame.num_prompt_tokens)
            case Delta():
                self._on_delta(frame)

    def close(self, error: SpecdecError | None = None) -> None:
        self._sink.close(error)
