"""The closed loop of a load benchmark: every stream asks its next output when its last one has ended.

Knows how to ask, and notes who said what when and what the servers counted meanwhile; makes no figure of it.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from specdec.bench.cpu_time import tree_cpu_s
from specdec.bench.load_plan import LoadCell, LoadPlan
from specdec.bench.scrape import Scrape, difference, scrape
from specdec.errors import MalformedRequestError, SpecdecError
from specdec.messages import Delta, Finished, GenerationEvent, RoundStatistics, SpeculativeStatistics
from specdec.params import GenerationSpec, Prompt

Generate = Callable[[GenerationSpec], AsyncIterator[GenerationEvent]]
"""Asks one running system."""


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of one stream. Times are seconds from the cell's start, as the client saw them."""

    key: tuple[int, int]
    asked_s: float
    ended_s: float
    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    rounds: tuple[RoundStatistics, ...]
    statistics: SpeculativeStatistics


@dataclasses.dataclass(frozen=True)
class CellRecord:
    """A cell as it was measured.

    Attributes:
        cpu_s: CPU seconds of each server process, and of this one as `client`.
        counters: what each server process counted meanwhile, by its metrics' names.
        errors: outputs that failed, by what was said.
    """

    cell: LoadCell
    elapsed_s: float
    outputs: Sequence[Output]
    cpu_s: Mapping[str, float]
    counters: Mapping[str, Scrape]
    errors: Sequence[str]


@dataclasses.dataclass(frozen=True)
class LoadSubject:
    """One running system. `connect` makes a connection for a tenant, ready to be asked; `pids` and `metrics_endpoints`
    are by process name, the shared verifier among them."""

    connect: Callable[[str], AbstractAsyncContextManager[Generate]]
    pids: Mapping[str, int]
    metrics_endpoints: Mapping[str, str]


async def run_cell(subject: LoadSubject, plan: LoadPlan, cell: LoadCell, prompts: Sequence[Prompt]) -> CellRecord:
    """All streams of a cell, to their ends. A failed output is noted, and its stream goes on."""
    outputs: list[Output] = []
    errors: list[str] = []

    async def stream(number: int, generate: Generate, began: float) -> None:
        for index in range(plan.num_outputs):
            spec = plan.spec(cell, number, index, prompts)
            try:
                outputs.append(await _receive(generate(spec), (number, index), began))
            except SpecdecError as error:
                errors.append(f"{error.reason}: {error.message}")

    async with subject.connect(cell.tenant) as generate:
        before = await _look(subject)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(cell.num_streams):
                group.create_task(stream(number, generate, began))
        elapsed_s = time.monotonic() - began
        after = await _look(subject)
    return CellRecord(
        cell=cell,
        elapsed_s=elapsed_s,
        outputs=sorted(outputs, key=lambda output: output.key),
        cpu_s={name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s.keys() & before.cpu_s.keys()},
        counters={name: difference(before.counters[name], after.counters[name]) for name in after.counters},
        errors=errors,
    )


async def _receive(events: AsyncIterator[GenerationEvent], key: tuple[int, int], began: float) -> Output:
    asked_s = time.monotonic() - began
    deltas: list[Delta] = []
    arrivals: list[tuple[float, int]] = []
    finished: Finished | None = None
    async for event in events:
        if isinstance(event, Delta):
            deltas.append(event)
            arrivals.append((time.monotonic() - began, len(event.token_ids)))
        elif isinstance(event, Finished):
            finished = event
    if finished is None or not deltas:
        raise MalformedRequestError("the stream lacks its last frame or any token")
    return Output(
        key=key,
        asked_s=asked_s,
        ended_s=time.monotonic() - began,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        arrivals=tuple(arrivals),
        rounds=tuple(delta.round for delta in deltas),
        statistics=finished.speculative,
    )


@dataclasses.dataclass(frozen=True)
class _Look:
    cpu_s: Mapping[str, float]
    counters: Mapping[str, Scrape]


async def _look(subject: LoadSubject) -> _Look:
    counters = await asyncio.gather(*(asyncio.to_thread(scrape, one) for one in subject.metrics_endpoints.values()))
    cpu_s = {name: seconds for name, pid in subject.pids.items() if (seconds := tree_cpu_s([pid])) is not None}
    cpu_s["client"] = time.process_time()
    return _Look(cpu_s, dict(zip(subject.metrics_endpoints, counters, strict=True)))
