"""One output as a patient client receives it: where its stream breaks, the client resumes elsewhere from what it has.

Knows what a client may rely on (positions of tokens, reasons of errors) and notes what it saw and when; judges nothing.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from specdec.errors import DeadlineError, FencedError, SpecdecError
from specdec.ids import SessionId
from specdec.messages import Delta, Finished, GenerationEvent, Started
from specdec.params import GenerationSpec
from specdec.replicas import RESUMABLE, Replica

RESUMABLE_REASONS = frozenset(error.reason for error in (*RESUMABLE, DeadlineError, FencedError))
"""After these a client comes again; all else is its own fault or a broken promise. A deadline within the system is
none of its own."""
SILENT = "SILENT"
"""Why a stream broke on which nothing came any more."""
_UNKNOWN = "UNKNOWN_SESSION"
_PAUSE_S = (0.1, 0.2, 0.5, 1.0)
"""Before each try after one that brought no token; the last for all that follow."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """`silence_s` without a frame, and the client takes its stream for broken; after `give_up_s` without a token in
    spite of all tries it takes the output for lost."""

    silence_s: float = 12.0
    give_up_s: float = 60.0


@dataclasses.dataclass(frozen=True)
class Break:
    """A stream that ended early. `reason` is that of the error, or SILENT."""

    at_s: float
    orchestrator: str
    reason: str
    message: str


@dataclasses.dataclass
class Output:
    """All that a client saw of one output. Times are seconds of `time.monotonic`.

    Attributes:
        num_lost: positions that were jumped over.
        num_repeated: tokens at positions that the client had already.
        breaks: streams that ended early, in order.
        error: why the client gave up; empty where the output came to its end.
    """

    number: int
    session_id: str
    asked_s: float
    orchestrator: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    num_lost: int = 0
    num_repeated: int = 0
    breaks: list[Break] = dataclasses.field(default_factory=list)
    num_failovers: int = 0
    ended_s: float | None = None
    finish_reason: str = ""
    error: str = ""


async def receive(
    output: Output,
    spec: GenerationSpec,
    orchestrators: Mapping[str, Replica],
    patience: Patience,
    new_session_id: Callable[[], str],
) -> None:
    """Fills `output`, whose `orchestrator` is asked first, until the output has ended or the client gives up."""
    names = list(orchestrators)
    began = False
    num_tries = 0
    last_token_s = time.monotonic()
    while output.ended_s is None:
        replica = orchestrators[output.orchestrator]
        if began:
            events = replica.resume(SessionId(output.session_id), tuple(output.token_ids), spec)
        else:
            events = replica.generate(spec, output.session_id)
        num_before = len(output.token_ids)
        fault = await _read(output, events, patience.silence_s)
        if fault is None:
            break
        output.breaks.append(fault)
        began = True
        if len(output.token_ids) > num_before:
            num_tries, last_token_s = 0, time.monotonic()
        if fault.reason == _UNKNOWN and not output.token_ids:
            began, output.session_id = False, new_session_id()  # it never was one: nothing is lost by asking anew
        elif fault.reason not in RESUMABLE_REASONS | {SILENT, _UNKNOWN}:
            output.error = f"{fault.reason}: {fault.message}"
        if time.monotonic() - last_token_s > patience.give_up_s:
            output.error = f"nothing came for {patience.give_up_s:g} s; at last {fault.reason}: {fault.message}"
        if output.error:
            output.ended_s = time.monotonic()
            break
        await asyncio.sleep(_PAUSE_S[min(num_tries, len(_PAUSE_S) - 1)])
        num_tries += 1
        if began:  # to ask anew, whoever said that it knows no such session is as good as any
            output.orchestrator = names[(names.index(output.orchestrator) + 1) % len(names)]


async def _read(output: Output, events: AsyncGenerator[GenerationEvent, None], silence_s: float) -> Break | None:
    """None once the output has ended, else why the stream did."""
    reason, message = "ENDED", "the stream ended without a last frame"
    prompt_length: int | None = None
    try:
        async with contextlib.aclosing(events):
            while True:
                async with asyncio.timeout(silence_s):
                    event = await anext(events, None)
                match event:
                    case None:
                        break
                    case Started():
                        prompt_length = event.num_prompt_tokens
                    case Delta():
                        _take(output, event, prompt_length)
                    case Finished():
                        output.text += event.text
                        output.finish_reason = event.reason.value
                        output.num_failovers += event.num_failovers
                        output.ended_s = time.monotonic()
                        return None
    except TimeoutError:
        reason, message = SILENT, f"no frame for {silence_s:g} s"
    except SpecdecError as error:
        reason, message = error.reason, error.message
    return Break(time.monotonic(), output.orchestrator, reason, message)


def _take(output: Output, delta: Delta, prompt_length: int | None) -> None:
    if prompt_length is None:
        raise SpecdecError("a Delta before Started")
    index = delta.position - prompt_length
    expected = len(output.token_ids)
    output.num_lost += max(0, index - expected)
    output.num_repeated += max(0, min(expected - index, len(delta.token_ids)))
    output.token_ids += delta.token_ids
    output.text += delta.text
    if delta.token_ids:
        output.arrivals.append((time.monotonic(), len(delta.token_ids)))
