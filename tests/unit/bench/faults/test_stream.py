"""A client that resumes: scripted orchestrators, no network."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence

from specdec.bench.faults.stream import SILENT, Output, Patience, receive
from specdec.errors import FencedError, SpecdecError, UnknownSessionError, VerifierLostError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, RoundStatistics, SpeculativeStatistics, Started, Usage
from specdec.params import AcceptanceRule, FinishReason, GenerationSpec

PROMPT_LENGTH = 5
NO_ROUND = RoundStatistics(0, 0, None, 0.0, 0.0, 0.0)
STARTED = Started(SessionId("s"), "model", 0, AcceptanceRule.GREEDY, PROMPT_LENGTH, "numerics")
FINISHED = Finished(FinishReason.LENGTH, Usage(5, 4), SpeculativeStatistics(), "!", num_failovers=1)
SPEC = GenerationSpec("hello")
NEVER = "never"

Step = GenerationEvent | SpecdecError | str


def delta(index: int, *token_ids: int) -> Delta:
    return Delta("".join(f"{token_id}" for token_id in token_ids), token_ids, PROMPT_LENGTH + index, NO_ROUND)


class Scripted:
    """Plays one script for each call, and notes the calls."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.calls: list[tuple[str, tuple[int, ...] | None]] = []
        self._scripts = iter(scripts)

    async def generate(self, spec: GenerationSpec, session_id: str = "") -> AsyncGenerator[GenerationEvent, None]:
        self.calls.append((session_id, None))
        async for event in self._play():
            yield event

    async def resume(
        self, session_id: SessionId, received_token_ids: Sequence[int], spec: GenerationSpec
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.calls.append((session_id, tuple(received_token_ids)))
        async for event in self._play():
            yield event

    async def _play(self) -> AsyncGenerator[GenerationEvent, None]:
        for step in next(self._scripts):
            if isinstance(step, SpecdecError):
                raise step
            if isinstance(step, str):
                await asyncio.Event().wait()
            else:
                yield step


async def received(one: Scripted, two: Scripted, patience: Patience | None = None) -> Output:
    ids = itertools.count(1)
    output = Output(0, "s0", 0.0, "one")
    await receive(output, SPEC, {"one": one, "two": two}, patience or Patience(), lambda: f"s{next(ids)}")
    return output


async def test_a_broken_stream_goes_on_at_the_other_replica_from_what_was_received() -> None:
    one = Scripted([STARTED, delta(0, 1, 2), VerifierLostError("lost")])
    two = Scripted([STARTED, delta(2, 3, 4), FINISHED])
    output = await received(one, two)
    assert (one.calls, two.calls) == ([("s0", None)], [("s0", (1, 2))])
    assert (output.token_ids, output.text) == ([1, 2, 3, 4], "1234!")
    assert (output.num_lost, output.num_repeated, output.num_failovers, output.error) == (0, 0, 1, "")
    assert [each.reason for each in output.breaks] == ["VERIFIER_LOST"]
    assert sum(number for _, number in output.arrivals) == 4


async def test_positions_tell_tokens_that_were_lost_or_repeated() -> None:
    output = await received(Scripted([STARTED, delta(0, 1), delta(3, 4), FINISHED]), Scripted())
    assert (output.num_lost, output.num_repeated) == (2, 0)
    output = await received(Scripted([STARTED, delta(0, 1, 2), delta(1, 2, 3), FINISHED]), Scripted())
    assert (output.num_lost, output.num_repeated) == (0, 1)


async def test_a_silent_stream_is_taken_for_broken() -> None:
    output = await received(
        Scripted([STARTED, delta(0, 1), NEVER]), Scripted([STARTED, delta(1, 2), FINISHED]), Patience(silence_s=0.05)
    )
    assert [each.reason for each in output.breaks] == [SILENT]
    assert output.token_ids == [1, 2]


async def test_a_session_that_nobody_knows_is_asked_anew_only_before_its_first_token() -> None:
    one = Scripted([VerifierLostError("lost")])
    two = Scripted([UnknownSessionError("no such session")], [STARTED, delta(0, 1), FINISHED])
    output = await received(one, two)
    assert (one.calls, two.calls) == ([("s0", None)], [("s0", ()), ("s1", None)])
    assert output.error == ""


async def test_an_error_that_no_client_can_help_ends_the_output() -> None:
    output = await received(Scripted([STARTED, delta(0, 1), SpecdecError("internal error")]), Scripted())
    assert output.error == "INTERNAL: internal error"
    assert output.ended_s is not None


async def test_a_client_gives_up_when_nothing_comes_for_long() -> None:
    fenced = [FencedError("another owner has the session")]
    one, two = Scripted(*[fenced] * 9), Scripted(*[fenced] * 9)
    output = await received(one, two, Patience(give_up_s=0.2))
    assert output.error.startswith("nothing came for 0.2 s; at last FENCED")
    assert len(output.breaks) == len(one.calls) + len(two.calls) > 2
