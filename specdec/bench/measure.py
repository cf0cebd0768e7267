"""The loop that measures: on every prompt each generation in its turn, one at a time, so that whoever is not asked
rests. Knows how to ask and what to write down; makes no figure of it."""

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from specdec.bench import figures
from specdec.bench.cpu_time import tree_cpu_s
from specdec.bench.peers import GREEDY
from specdec.bench.plan import BenchPrompt, Lane, in_turn
from specdec.bench.records import Generation, PeerGeneration, PromptRecord, Recording, TopTwo
from specdec.errors import MalformedRequestError
from specdec.messages import Delta, Finished, GenerationEvent, Started
from specdec.params import ChatMessage, GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria

TARGET_ONLY = "target_only"


class Peer(Protocol):
    """Another program that generates; see TransformersPeer."""

    @property
    def modes(self) -> Sequence[str]: ...

    async def generate(self, mode: str, prompt: str, max_new_tokens: int) -> PeerGeneration: ...

    async def top_two(self, prompt: str, output_token_ids: Sequence[int]) -> TopTwo: ...


Generate = Callable[[GenerationSpec], AsyncIterator[GenerationEvent]]
"""Asks one running system."""


@dataclasses.dataclass(frozen=True)
class Subjects:
    """Who is measured. `systems` is by lane; target-only outputs come from the first. The process ids are of all our
    servers and of all peers, for the CPU time of those that rest."""

    systems: Mapping[Lane, Generate]
    peer: Peer | None = None
    server_pids: Sequence[int] = ()
    peer_pids: Sequence[int] = ()


def make_spec(prompt: str, max_new_tokens: int, *, speculation: bool) -> GenerationSpec:
    """Greedy, the prompt as the first turn of a chat."""
    return GenerationSpec(
        prompt=(ChatMessage("user", prompt),),
        sampling=SamplingParams(temperature=0.0),
        stop=StopCriteria(max_new_tokens=max_new_tokens),
        speculation=SpeculationOptions(disabled=not speculation),
    )


async def measure_prompts(
    subjects: Subjects,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    recording: Recording,
    on_step: Callable[[BenchPrompt, str], None] = lambda prompt, step: None,
    on_prompt: Callable[[PromptRecord], None] = lambda record: None,
) -> None:
    """Fills `recording` as it goes. `on_step` is told the prompt and, before each generation, a lane's label, a peer's
    mode or `target_only`.

    Raises:
        SpecdecError, PeerError: a generation failed; what came before it is in the recording.
    """
    modes = subjects.peer.modes if subjects.peer is not None else ()
    steps: list[Lane | str] = [TARGET_ONLY, *subjects.systems, *modes]
    for index, prompt in enumerate(prompts):
        record = PromptRecord(prompt)
        recording.prompts.append(record)
        for step in in_turn(steps, index):
            on_step(prompt, step.label if isinstance(step, Lane) else step)
            if isinstance(step, Lane) or step == TARGET_ONLY:
                await _measure_ours(subjects, step, record, max_new_tokens, recording)
            else:
                await _measure_peer(subjects, step, record, max_new_tokens, recording)
        if subjects.peer is not None:
            record.top_two = await _top_two_where_they_part(subjects.peer, record)
        on_prompt(record)


async def warm_up(subjects: Subjects, prompt: BenchPrompt, max_new_tokens: int) -> None:
    """One short output of each kind, not recorded: first calls allocate, and drafters attach and connect."""
    for generate in subjects.systems.values():
        for speculation in (False, True):
            await receive(generate(make_spec(prompt.text, max_new_tokens, speculation=speculation)))
    if subjects.peer is not None:
        for mode in subjects.peer.modes:
            await subjects.peer.generate(mode, prompt.text, max_new_tokens)


async def receive(events: AsyncIterator[GenerationEvent], clock: Callable[[], float] = time.monotonic) -> Generation:
    """Reads one stream to its end.

    Raises:
        MalformedRequestError: the stream lacks its first or last frame, or has no token.
    """
    began = clock()
    started: Started | None = None
    finished: Finished | None = None
    deltas: list[Delta] = []
    arrivals_s: list[float] = []
    async for event in events:
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Delta):
            deltas.append(event)
            arrivals_s.append(clock() - began)
        elif isinstance(event, Finished):
            finished = event
    elapsed_s = clock() - began
    if started is None or finished is None or not deltas:
        raise MalformedRequestError("the stream lacks its first frame, its last frame or any token")
    return Generation(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        num_prompt_tokens=started.num_prompt_tokens,
        num_first_tokens=len(deltas[0].token_ids),
        first_tokens_s=arrivals_s[0],
        last_tokens_s=arrivals_s[-1],
        elapsed_s=elapsed_s,
        rounds=tuple(delta.round for delta in deltas),
        statistics=finished.speculative,
        numerics_fingerprint=started.numerics_fingerprint,
    )


async def _measure_ours(
    subjects: Subjects, step: Lane | str, record: PromptRecord, max_new_tokens: int, recording: Recording
) -> None:
    speculation = isinstance(step, Lane)
    generate = subjects.systems[step] if isinstance(step, Lane) else next(iter(subjects.systems.values()))
    idle_before_s = tree_cpu_s(subjects.peer_pids) if subjects.peer_pids else None
    generation = await receive(generate(make_spec(record.prompt.text, max_new_tokens, speculation=speculation)))
    _note_idle(recording.idle.peers_during_servers, subjects.peer_pids, idle_before_s, generation.elapsed_s)
    if isinstance(step, Lane):
        record.speculative[step.label] = generation
    else:
        record.target_only = generation


async def _measure_peer(
    subjects: Subjects, mode: str, record: PromptRecord, max_new_tokens: int, recording: Recording
) -> None:
    if subjects.peer is None:
        return
    idle_before_s = tree_cpu_s(subjects.server_pids) if subjects.server_pids else None
    generation = await subjects.peer.generate(mode, record.prompt.text, max_new_tokens)
    _note_idle(recording.idle.servers_during_peers, subjects.server_pids, idle_before_s, generation.elapsed_s)
    record.peers[mode] = generation


async def _top_two_where_they_part(peer: Peer, record: PromptRecord) -> TopTwo | None:
    if record.target_only is None or GREEDY not in record.peers:
        return None
    ours, theirs = record.target_only.token_ids, record.peers[GREEDY].token_ids
    index = figures.first_difference(ours, theirs)
    return None if index is None else await peer.top_two(record.prompt.text, ours[:index])


def _note_idle(shares: list[float], pids: Sequence[int], before_s: float | None, elapsed_s: float) -> None:
    after_s = tree_cpu_s(pids) if before_s is not None else None
    if before_s is not None and after_s is not None and elapsed_s > 0:
        shares.append(max(0.0, after_s - before_s) / elapsed_s)
