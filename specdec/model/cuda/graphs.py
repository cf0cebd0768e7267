"""Forwards of fixed shapes, recorded once and replayed: the host's work of a step is then one launch.

Knows shapes: (rows, wanted rows), each from the counts that were proven exact. What runs is a function of the shape
that reads buffers at fixed addresses. A recorder does the recording, so that this works, and is tested, without CUDA.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

Forward = Callable[[], Tensor]
_WARM_UP_RUNS = 2  # kernels compile and libraries choose their workspaces before anything is recorded

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def record(self, forward: Forward) -> Forward:
        """Runs the forward and returns what repeats it. The tensor it returns is overwritten by the next repetition."""
        ...


class CudaGraphRecorder:
    """Graphs on one device that share their memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Forward) -> Forward:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class GraphedForwards:
    """Runs `forward(rows, wanted rows)` by a recording where there is one, else as it is."""

    def __init__(self, forward: Callable[[int, int], Tensor], recorder: Recorder) -> None:
        self._forward, self._recorder = forward, recorder
        self._recorded: dict[tuple[int, int], Forward] = {}

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._recorded))

    def record(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Records forwards of these shapes, the largest first, in place of those recorded before.

        Where one cannot be recorded, it and the smaller ones run as they are, and the log says so.
        """
        self._recorded.clear()
        for shape in sorted(shapes, reverse=True):
            try:
                self._recorded[shape] = self._recorder.record(functools.partial(self._forward, *shape))
            except RuntimeError as error:
                log.warning("forwards of %d rows and fewer are not recorded as graphs: %s", shape[0], error)
                return

    def run(self, num_rows: int, num_wanted: int) -> Tensor:
        """[wanted rows, V], good until the next run."""
        recorded = self._recorded.get((num_rows, num_wanted))
        return self._forward(num_rows, num_wanted) if recorded is None else recorded()
