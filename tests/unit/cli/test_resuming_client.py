"""A stream that breaks goes on at the next orchestrator, and its reader does not notice."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence

import pytest

from specdec.cli.resuming_client import ResumingClient
from specdec.errors import (
    FencedError,
    InvalidParameterError,
    NoVerifierError,
    OverloadedError,
    PeerUnavailableError,
    RateLimitedError,
    SpecdecError,
    VerifierLostError,
)
from specdec.ids import SessionId
from specdec.messages import (
    Delta,
    Finished,
    GenerationEvent,
    RoundStatistics,
    SpeculativeStatistics,
    Started,
    Usage,
)
from specdec.params import AcceptanceRule, FinishReason, GenerationSpec, sample_session_id

NUM_TOKENS = 6
NO_ROUND = RoundStatistics(0, 0, None, 0.0, 0.0, 0.0)
SPEC = GenerationSpec("a prompt")


@dataclasses.dataclass
class ScriptedOrchestrator:
    """Streams tokens 0, 1, 2, ... of each sample, and breaks each stream that it takes as the next of `breaks` says:
    after so many tokens of a sample, with an error. Without one the stream comes to its end."""

    breaks: list[tuple[int, SpecdecError]] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)

    async def generate(self, spec: GenerationSpec, session_id: str = "") -> AsyncGenerator[GenerationEvent, None]:
        self.asked.append("generate")
        num_until, error = self.breaks.pop(0) if self.breaks else (NUM_TOKENS, None)
        if num_until < 0 and error is not None:
            raise error
        yield _started(SessionId(session_id), spec.num_samples)
        for index in range(spec.num_samples):
            for event in _output(index, 0, min(num_until, NUM_TOKENS)):
                yield event
            if error is None or index == 1:  # of several samples the second was whole already
                yield _finished(index)
        if error is not None:
            raise error

    async def resume(
        self, session_id: SessionId, received_token_ids: Sequence[int], spec: GenerationSpec
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.asked.append(f"resume {len(received_token_ids)}")
        index = int(session_id.partition(".")[2] or 0)
        num_until, error = self.breaks.pop(0) if self.breaks else (NUM_TOKENS, None)
        if num_until < 0 and error is not None:
            raise error
        yield _started(session_id, 1)
        for event in _output(index, len(received_token_ids), num_until):
            yield event
        if error is not None:
            raise error
        yield _finished(index)


def _started(session_id: SessionId, num_samples: int) -> Started:
    samples = tuple(sample_session_id(session_id, index) for index in range(num_samples)) if num_samples > 1 else ()
    return Started(session_id, "target", 1, AcceptanceRule.GREEDY, 3, "f", samples)


def _output(index: int, start: int, end: int) -> list[Delta]:
    return [Delta(f"<{number}>", (number,), 3 + number, NO_ROUND, sample_index=index) for number in range(start, end)]


def _finished(index: int) -> Finished:
    return Finished(FinishReason.LENGTH, Usage(3, NUM_TOKENS), SpeculativeStatistics(), "", index)


async def _read(client: ResumingClient, spec: GenerationSpec = SPEC) -> list[GenerationEvent]:
    return [event async for event in client.generate(spec)]


def _tokens(events: Sequence[GenerationEvent], index: int = 0) -> list[int]:
    deltas = [event for event in events if isinstance(event, Delta) and event.sample_index == index]
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_a_broken_stream_goes_on_at_the_other_orchestrator_without_a_lost_or_repeated_token() -> None:
    first, second = ScriptedOrchestrator([(2, PeerUnavailableError("gone"))]), ScriptedOrchestrator()
    events = await _read(ResumingClient([first, second]))
    assert _tokens(events) == list(range(NUM_TOKENS))
    assert [type(event) for event in (events[0], events[-1])] == [Started, Finished]
    assert sum(isinstance(event, Started) for event in events) == 1
    assert (first.asked, second.asked) == (["generate"], ["resume 2"])


async def test_it_comes_again_until_a_verifier_is_there() -> None:
    broken = ScriptedOrchestrator([(3, VerifierLostError("lost")), (-1, NoVerifierError("none"))])
    told: list[str] = []
    events = await _read(ResumingClient([broken], on_break=lambda error: told.append(error.reason)))
    assert _tokens(events) == list(range(NUM_TOKENS))
    assert told == ["VERIFIER_LOST", "NO_VERIFIER"]


async def test_it_does_not_take_a_session_back_that_somebody_else_has_resumed() -> None:
    with pytest.raises(FencedError):
        await _read(ResumingClient([ScriptedOrchestrator([(3, FencedError("taken"))])]))


async def test_each_sample_that_had_not_ended_is_resumed_by_itself() -> None:
    first, second = ScriptedOrchestrator([(4, PeerUnavailableError("gone"))]), ScriptedOrchestrator()
    events = await _read(ResumingClient([first, second]), dataclasses.replace(SPEC, num_samples=3))
    assert [_tokens(events, index) for index in (0, 2)] == [list(range(NUM_TOKENS))] * 2
    assert sorted(event.sample_index for event in events if isinstance(event, Finished)) == [0, 1, 2]
    assert second.asked.count("resume 4") + first.asked.count("resume 4") == 2


async def test_an_orchestrator_that_is_not_there_is_passed_over() -> None:
    absent, present = ScriptedOrchestrator([(-1, PeerUnavailableError("no server"))]), ScriptedOrchestrator()
    assert _tokens(await _read(ResumingClient([absent, present]))) == list(range(NUM_TOKENS))


@pytest.mark.parametrize("error", [OverloadedError("full"), InvalidParameterError("no"), PeerUnavailableError("no")])
async def test_what_cannot_be_resumed_is_told(error: SpecdecError) -> None:
    with pytest.raises(type(error)):
        await _read(ResumingClient([ScriptedOrchestrator([(-1, error)])]))


async def test_it_gives_up_where_no_token_comes_any_more() -> None:
    broken = ScriptedOrchestrator([(1, VerifierLostError("lost"))] * 2)
    with pytest.raises(VerifierLostError):
        await _read(ResumingClient([broken], give_up_s=0.0))


async def test_it_comes_again_when_it_was_told_and_not_where_that_is_too_late() -> None:
    refused = RateLimitedError("over its share", retry_after_s=0.01)
    patient = ScriptedOrchestrator([(2, VerifierLostError("lost")), (-1, refused)])
    assert _tokens(await _read(ResumingClient([patient]))) == list(range(NUM_TOKENS))
    late = ScriptedOrchestrator([(2, VerifierLostError("lost")), (-1, OverloadedError("full", retry_after_s=1000.0))])
    with pytest.raises(OverloadedError):
        await _read(ResumingClient([late], give_up_s=30.0))
