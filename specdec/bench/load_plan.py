"""What a load benchmark runs and in which order: how many streams, which way of speculating, whose turn it is. Pure."""

import dataclasses
import random
import zlib
from collections.abc import Iterator, Sequence

from specdec.bench.plan import BenchPrompt, Lane, PlanError, in_turn
from specdec.params import ChatMessage, GenerationSpec, Prompt, SamplingParams, SpeculationOptions, StopCriteria

TARGET_ONLY = "target_only"
MAX_STREAMS = 4096


@dataclasses.dataclass(frozen=True)
class LoadCell:
    """One measurement: so many streams at once, one way. `lane` None is the target alone."""

    repetition: int
    num_streams: int
    lane: Lane | None

    @property
    def label(self) -> str:
        return TARGET_ONLY if self.lane is None else self.lane.label

    @property
    def tenant(self) -> str:
        """Of its own, so that no cell finds its prompts in the cache because another asked them before."""
        return f"bench-{self.repetition}-{self.num_streams}-{zlib.crc32(self.label.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Every stream asks `num_outputs` outputs of `max_new_tokens` tokens, one after the other.

    `temperature` 0 is greedy; above it each stream samples by its own seed, under the rule coupled.
    """

    lanes: Sequence[Lane]
    stream_counts: Sequence[int]
    num_repetitions: int
    num_outputs: int
    max_new_tokens: int
    temperature: float = 0.0

    def cells(self) -> Iterator[LoadCell]:
        """Ways take turns at each number of streams, in swapped order at every other repetition."""
        ways: list[Lane | None] = [None, *self.lanes]
        for repetition in range(self.num_repetitions):
            for num_streams in self.stream_counts:
                for lane in in_turn(ways, repetition):
                    yield LoadCell(repetition, num_streams, lane)

    def spec(self, cell: LoadCell, stream: int, output: int, prompts: Sequence[Prompt]) -> GenerationSpec:
        """The same for every lane of a repetition, but for speculation."""
        number = stream * self.num_outputs + output
        sampled = SamplingParams(temperature=self.temperature, seed=number)
        return GenerationSpec(
            prompt=prompts[number % len(prompts)],
            sampling=sampled if self.temperature else SamplingParams(temperature=0.0),
            stop=StopCriteria(max_new_tokens=self.max_new_tokens, ignore_end_of_sequence=True),
            speculation=SpeculationOptions(disabled=cell.lane is None),
        )


def parse_stream_counts(text: str) -> tuple[int, ...]:
    """Reads `1,2,4`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= MAX_STREAMS for part in parts):
        raise PlanError(f"{text!r}: want numbers of streams in [1, {MAX_STREAMS}] with commas")
    counts = tuple(map(int, parts))
    if len(set(counts)) != len(counts):
        raise PlanError(f"{text!r}: a number of streams is given twice")
    return counts


def chat_prompts(prompts: Sequence[BenchPrompt]) -> list[Prompt]:
    return [(ChatMessage("user", prompt.text),) for prompt in prompts]


def made_up_prompts(num_prompts: int, num_tokens: int, vocabulary_size: int) -> list[Prompt]:
    """Ids at random, the same in every run: for models whose prompts need no meaning, at a length that is known."""
    generator = random.Random(num_tokens)  # noqa: S311 - prompts, not secrets
    first_id = vocabulary_size // 2  # past special tokens, wherever a vocabulary begins with them
    return [
        tuple(generator.randrange(first_id, vocabulary_size) for _ in range(num_tokens)) for _ in range(num_prompts)
    ]
