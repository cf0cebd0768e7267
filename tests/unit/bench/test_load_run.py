import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from specdec.bench.load_plan import LoadCell, LoadPlan, made_up_prompts
from specdec.bench.load_run import CellRecord, Generate, LoadSubject, run_cell
from specdec.errors import OverloadedError
from specdec.messages import Delta, Finished, GenerationEvent, RoundStatistics, SpeculativeStatistics, Usage
from specdec.params import FinishReason, GenerationSpec, NextTokenKind
from tests.unit.bench.load import NGRAM

PLAN = LoadPlan((NGRAM,), (3,), num_repetitions=1, num_outputs=2, max_new_tokens=4)
PROMPTS = made_up_prompts(6, 4, 1000)
ROUND = RoundStatistics(0, 0, NextTokenKind.PLAIN, total_time_s=0.1, verify_forward_time_s=0.1, queue_time_s=0.0)


class ScriptedSystem:
    """Says the first token of the prompt again, in two deltas. Notes for whom and how many were open at once."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.num_open = self.most_open = 0
        self.refused_prompts: list[object] = []
        self.ends = True

    @contextlib.asynccontextmanager
    async def connect(self, tenant: str) -> AsyncIterator[Generate]:
        self.tenants.append(tenant)
        yield self.generate

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[GenerationEvent]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if spec.prompt in self.refused_prompts:
                raise OverloadedError("too many", retry_after_s=1.0)
            first = spec.prompt[0]
            assert isinstance(first, int)
            for _ in range(2):
                yield Delta(text="", token_ids=(first, first), position=4, round=ROUND)
            if self.ends:
                yield Finished(FinishReason.LENGTH, Usage(4, 4), SpeculativeStatistics(), "")
        finally:
            self.num_open -= 1


async def run(system: ScriptedSystem) -> tuple[LoadCell, CellRecord]:
    cell = LoadCell(0, 3, NGRAM)
    return cell, await run_cell(LoadSubject(system.connect, {}, {}), PLAN, cell, PROMPTS)


async def test_every_stream_asks_its_next_output_when_its_last_has_ended() -> None:
    system = ScriptedSystem()
    cell, record = await run(system)
    assert system.most_open == 3
    assert [output.key for output in record.outputs] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [output.token_ids for output in record.outputs] == [(prompt[0],) * 4 for prompt in PROMPTS]
    assert system.tenants == [cell.tenant]
    assert all(0 <= output.asked_s <= output.arrivals[0][0] <= output.ended_s for output in record.outputs)


async def test_an_output_that_fails_is_noted_and_its_stream_goes_on() -> None:
    system = ScriptedSystem()
    system.refused_prompts = [PROMPTS[2]]
    _, record = await run(system)
    assert [output.key for output in record.outputs] == [(0, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert record.errors == ["OVERLOADED: too many"]


async def test_a_stream_without_its_last_frame_is_no_output() -> None:
    system = ScriptedSystem()
    system.ends = False
    _, record = await run(system)
    assert len(record.errors) == 6
    assert record.outputs == []


async def test_a_defect_of_ours_is_not_taken_for_a_failed_output() -> None:
    system = ScriptedSystem()
    system.generate = None  # type: ignore[method-assign, assignment]
    with pytest.raises(ExceptionGroup):
        await run_cell(LoadSubject(system.connect, {}, {}), PLAN, LoadCell(0, 3, NGRAM), PROMPTS)
