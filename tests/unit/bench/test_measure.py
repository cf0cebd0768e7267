from collections.abc import AsyncIterator, Sequence

import pytest

from specdec.bench.measure import Subjects, measure_prompts, receive, warm_up
from specdec.bench.plan import BenchPrompt, Lane
from specdec.bench.records import PeerGeneration, TopTwo
from specdec.errors import MalformedRequestError, VerifierLostError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, SpeculativeStatistics, Started, Usage
from specdec.params import AcceptanceRule, ChatMessage, FinishReason, GenerationSpec
from tests.unit.bench.synthetic import DRAFT, NGRAM, recording, verify_round

_PROMPTS = [BenchPrompt("a", "qa", "first"), BenchPrompt("b", "qa", "second")]
_STARTED = Started(SessionId("s"), "big", 1, AcceptanceRule.GREEDY, 5, "print")


class ScriptedSystem:
    """Answers with fixed ids and notes who was asked in which order."""

    def __init__(self, name: str, log: list[str], token_ids: Sequence[int] = (1, 2, 3)) -> None:
        self.name, self.log, self.token_ids = name, log, token_ids
        self.specs: list[GenerationSpec] = []
        self.fails = False

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[GenerationEvent]:
        self.specs.append(spec)
        self.log.append(f"{self.name} {'off' if spec.speculation.disabled else 'on'}")
        yield _STARTED
        if self.fails:
            raise VerifierLostError("gone")
        yield _delta(self.token_ids[:1])
        yield _delta(self.token_ids[1:])
        yield _finished()


class ScriptedPeer:
    def __init__(self, log: list[str], token_ids: Sequence[int]) -> None:
        self.log, self.token_ids = log, tuple(token_ids)
        self.asked_for_top_two: list[tuple[str, tuple[int, ...]]] = []

    @property
    def modes(self) -> Sequence[str]:
        return ("transformers_greedy",)

    async def generate(self, mode: str, prompt: str, max_new_tokens: int) -> PeerGeneration:
        self.log.append(mode)
        return PeerGeneration(self.token_ids, 5, 1.0)

    async def top_two(self, prompt: str, output_token_ids: Sequence[int]) -> TopTwo:
        self.asked_for_top_two.append((prompt, tuple(output_token_ids)))
        return TopTwo((9, 2), (1.0, 0.5))


def _delta(token_ids: Sequence[int]) -> Delta:
    return Delta(text="x", token_ids=token_ids, position=5, round=verify_round(2, len(token_ids) - 1))


def _finished() -> Finished:
    return Finished(FinishReason.LENGTH, Usage(5, 3), SpeculativeStatistics(num_drafts=2), "")


async def test_all_take_turns_on_a_prompt_and_the_order_swaps() -> None:
    log: list[str] = []
    systems = {NGRAM: ScriptedSystem("ngram", log), DRAFT: ScriptedSystem("draft", log)}
    taken = recording(lanes=(NGRAM, DRAFT))
    subjects = Subjects({lane: system.generate for lane, system in systems.items()}, ScriptedPeer(log, (1, 2, 3)))
    await measure_prompts(subjects, _PROMPTS, 3, taken)
    in_order = ["ngram off", "ngram on", "draft on", "transformers_greedy"]
    assert log == in_order + in_order[::-1]
    assert [set(record.speculative) for record in taken.prompts] == [{NGRAM.label, DRAFT.label}] * 2


async def test_prompts_are_asked_greedily_as_the_first_turn_of_a_chat() -> None:
    system = ScriptedSystem("ngram", [])
    await measure_prompts(Subjects({NGRAM: system.generate}), _PROMPTS[:1], 3, recording())
    for spec in system.specs:
        assert spec.prompt == (ChatMessage("user", "first"),)
        assert spec.sampling.temperature == 0
        assert spec.stop.max_new_tokens == 3


async def test_logits_are_asked_for_where_our_output_leaves_the_peers() -> None:
    log: list[str] = []
    peer = ScriptedPeer(log, (1, 9, 3))
    taken = recording()
    await measure_prompts(Subjects({NGRAM: ScriptedSystem("ngram", log).generate}, peer), _PROMPTS[:1], 3, taken)
    assert peer.asked_for_top_two == [("first", (1,))]
    assert taken.prompts[0].top_two == TopTwo((9, 2), (1.0, 0.5))


async def test_what_was_measured_before_a_failure_stays_in_the_recording() -> None:
    systems = {lane: ScriptedSystem(lane.proposer, []) for lane in (NGRAM, DRAFT)}
    systems[DRAFT].fails = True
    taken = recording(lanes=(NGRAM, DRAFT))
    with pytest.raises(VerifierLostError):
        await measure_prompts(Subjects({lane: system.generate for lane, system in systems.items()}), _PROMPTS, 3, taken)
    assert [record.prompt.prompt_id for record in taken.prompts] == ["a"]
    assert taken.prompts[0].target_only is not None
    assert set(taken.prompts[0].speculative) == {NGRAM.label}


async def test_warm_up_asks_everyone_and_records_nothing() -> None:
    log: list[str] = []
    subjects = Subjects({NGRAM: ScriptedSystem("ngram", log).generate}, ScriptedPeer(log, (1,)))
    await warm_up(subjects, _PROMPTS[0], 8)
    assert log == ["ngram off", "ngram on", "transformers_greedy"]


async def test_times_are_those_that_the_client_saw() -> None:
    ticks = iter([100.0, 101.0, 104.0, 104.5])
    generation = await receive(ScriptedSystem("ngram", []).generate(_spec()), clock=lambda: next(ticks))
    assert generation.token_ids == (1, 2, 3)
    assert (generation.first_tokens_s, generation.last_tokens_s, generation.elapsed_s) == (1.0, 4.0, 4.5)
    assert generation.num_first_tokens == 1
    assert generation.num_prompt_tokens == 5


@pytest.mark.parametrize("events", [[], [_STARTED, _delta([1])], [_delta([1]), _finished()], [_STARTED, _finished()]])
async def test_a_stream_without_all_its_frames_is_no_measurement(events: list[GenerationEvent]) -> None:
    async def stream() -> AsyncIterator[GenerationEvent]:
        for event in events:
            yield event

    with pytest.raises(MalformedRequestError):
        await receive(stream())


def _spec() -> GenerationSpec:
    return GenerationSpec(prompt="x")


def test_lanes_are_told_apart_by_what_they_draft_with() -> None:
    assert Lane("draft_model", "small", "int8") != Lane("draft_model", "small", "none")
