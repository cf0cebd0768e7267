"""What a benchmark runs and in which order: prompts, proposers, whose turn it is. Pure but for reading a file."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from specdec.model.synthetic_options import is_synthetic

OTHER = "other"
PROPOSERS = ("draft_model", "ngram", "stacked")
PROPOSERS_WITH_MODEL = ("draft_model", "stacked")
QUANTIZATIONS = ("none", "int8", "int4")
_COMMA_BETWEEN_LANES = re.compile(r",(?![a-z_]+=)")  # those before an option belong to a synthetic model's name

StepT = TypeVar("StepT")


class PlanError(ValueError):
    """The command line or the prompt file asks for something that cannot be run."""


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """`text` is the first user turn."""

    prompt_id: str
    category: str
    text: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """One way to speculate, measured beside the others. A proposer without a model has neither of the last two."""

    proposer: str
    draft_model: str | None = None
    quantization: str | None = None

    @property
    def label(self) -> str:
        return ":".join(part for part in (self.proposer, self.draft_model, self.quantization) if part is not None)


def parse_lanes(texts: Sequence[str], draft_model: str | None, quantization: str) -> tuple[Lane, ...]:
    """Reads `PROPOSER[:MODEL[:QUANTIZATION]]`, several to a text with commas; the other two fill what is left out.

    A synthetic model has a colon in its name and no quantization.
    """
    lanes: list[Lane] = []
    for text in (part.strip() for joined in texts for part in _COMMA_BETWEEN_LANES.split(joined)):
        proposer, _, rest = text.partition(":")
        named, *more = [rest] if is_synthetic(rest) else rest.split(":")
        if proposer not in PROPOSERS or len(more) > 1:
            raise PlanError(f"{text!r}: want PROPOSER[:MODEL[:QUANTIZATION]], PROPOSER one of {', '.join(PROPOSERS)}")
        if proposer not in PROPOSERS_WITH_MODEL:
            if ":" in text:
                raise PlanError(f"{text!r}: {proposer} has no draft model")
            lane = Lane(proposer)
        else:
            model = named or draft_model
            if model is None:
                raise PlanError(f"{text!r}: {proposer} needs a draft model, as {proposer}:NAME or --draft-model NAME")
            lane = Lane(proposer, model, None if is_synthetic(model) else more[0] if more else quantization)
            if lane.quantization not in (None, *QUANTIZATIONS):
                raise PlanError(f"{text!r}: quantization is one of {', '.join(QUANTIZATIONS)}")
        if lane in lanes:
            raise PlanError(f"{lane.label}: given twice")
        lanes.append(lane)
    return tuple(lanes)


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Reads one JSON object a line with `id`, `category` and `turns`."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            prompts.append(BenchPrompt(str(record["id"]), str(record["category"]), str(record["turns"][0])))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PlanError(f"{path}, line {number}: want id, category and turns") from error
    return tuple(prompts)


def parse_take(texts: Sequence[str]) -> dict[str, int]:
    """Reads `CATEGORY=COUNT`; the category `other` stands for every one not named."""
    take: dict[str, int] = {}
    for text in texts:
        category, equals, count = text.partition("=")
        if not category or not equals or not count.isdecimal() or category in take:
            raise PlanError(f"{text!r}: want CATEGORY=COUNT, each category once")
        take[category] = int(count)
    return take


def select_prompts(prompts: Sequence[BenchPrompt], take: Mapping[str, int]) -> tuple[BenchPrompt, ...]:
    """The first so many of each category, categories taking turns so that an early end leaves some of each.

    Raises:
        PlanError: a category is unknown or has too few prompts, or nothing is left.
    """
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    if unknown := set(take) - set(by_category) - {OTHER}:
        raise PlanError(f"no prompts of {', '.join(sorted(unknown))}; there are {', '.join(by_category)}")
    taken = []
    for category, candidates in by_category.items():
        count = take.get(category, take.get(OTHER, 0))
        if count > len(candidates):
            raise PlanError(f"{category} has {len(candidates)} prompts, {count} are asked for")
        taken += [(rank / count, prompt) for rank, prompt in enumerate(candidates[:count])]
    if not taken:
        raise PlanError("no prompt is selected")
    return tuple(prompt for _, prompt in sorted(taken, key=lambda ranked: ranked[0]))


def in_turn(steps: Sequence[StepT], prompt_index: int) -> Sequence[StepT]:
    """The order is swapped at every other prompt, so that a slow drift of the machine favours nobody."""
    return steps if prompt_index % 2 == 0 else steps[::-1]
