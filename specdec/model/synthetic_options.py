"""How a synthetic model is asked for: `synthetic:` and `name=value` pairs with commas between them.

Pure: text in, checked values out. Knows the names, their ranges and what is meant by a time per rows.

    synthetic:seed=1,vocabulary=4096,context=32768,forward_ms=1:30/64:42,acceptance=0.8
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import ModelLoadError

PREFIX = "synthetic:"
MIN_VOCABULARY_SIZE = 512
"""Special tokens, every byte, and some words."""


@dataclasses.dataclass(frozen=True)
class ForwardTimes:
    """Seconds of a forward by its rows: straight lines between `points` (rows, seconds), the first time before them,
    the last line's slope after them, and `row_s` for each row on top."""

    points: tuple[tuple[int, float], ...] = ((1, 0.0),)
    row_s: float = 0.0

    def expected_s(self, num_rows: int) -> float:
        return self._on_the_lines(num_rows) + self.row_s * num_rows

    def _on_the_lines(self, num_rows: int) -> float:
        if num_rows <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        lines = list(itertools.pairwise(self.points))
        (rows_before, time_before_s), (rows_after, time_after_s) = next(
            (line for line in lines if num_rows <= line[1][0]), lines[-1]
        )
        share = (num_rows - rows_before) / (rows_after - rows_before)
        return max(0.0, time_before_s + share * (time_after_s - time_before_s))


@dataclasses.dataclass(frozen=True)
class SyntheticOptions:
    """What a synthetic model is like.

    Attributes:
        seed: models of one seed and one vocabulary speak alike, however they are timed.
        vocabulary_size: token ids, all of them real.
        context_limit: most positions of a session.
        times: what a forward takes.
        acceptance: probability, at each position, that this model wants the same token as the model of the same seed
            with acceptance 1: what a draft model is given. Decided by the prefix, so that a run can be repeated.
        end_rate: probability, at each position, that the output ends there. By default it never does.
    """

    seed: int = 0
    vocabulary_size: int = 4096
    context_limit: int = 32_768
    times: ForwardTimes = ForwardTimes()
    acceptance: float = 1.0
    end_rate: float = 0.0


def is_synthetic(name: str) -> bool:
    return name.startswith(PREFIX)


def parse_synthetic(name: str) -> SyntheticOptions:
    """Raises ModelLoadError that names the option and what it takes."""
    values: dict[str, Any] = {}
    for text in filter(None, name.removeprefix(PREFIX).split(",")):
        option, equals, value = text.partition("=")
        if not equals or option not in _READERS:
            raise ModelLoadError(
                f"synthetic: {text!r} is not an option; want NAME=VALUE, NAME of {', '.join(_READERS)}"
            )
        if option in values:
            raise ModelLoadError(f"synthetic: {option} is given twice")
        try:
            values[option] = _READERS[option](value)
        except ValueError as error:
            raise ModelLoadError(f"synthetic: {option}={value}: {error}") from None
    times = ForwardTimes(values.get("forward_ms", ForwardTimes.points), values.get("row_ms", 0.0))
    renamed = {field: values[option] for option, field in _FIELDS.items() if option in values}
    return SyntheticOptions(times=times, **renamed)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ValueError(f"want a whole number in [{low}, {high}]")
        return int(text)

    return read


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise ValueError(f"want a number in [{low:g}, {high:g}]")
        return number

    return read


def _milliseconds(text: str) -> float:
    return _number(0, 60_000)(text) / 1000


def _times(text: str) -> tuple[tuple[int, float], ...]:
    """`MS`, or `ROWS:MS/ROWS:MS...` with ascending rows."""
    if ":" not in text:
        return ((1, _milliseconds(text)),)
    points = []
    for point in text.split("/"):
        rows, _, time = point.partition(":")
        points.append((_integer(1, 1 << 20)(rows), _milliseconds(time)))
    if any(before[0] >= after[0] for before, after in itertools.pairwise(points)):
        raise ValueError("want ROWS:MS/ROWS:MS with ascending rows")
    return tuple(points)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "seed": _integer(0, 2**32 - 1),
    "vocabulary": _integer(MIN_VOCABULARY_SIZE, 1 << 20),
    "context": _integer(16, 1 << 22),
    "forward_ms": _times,
    "row_ms": _milliseconds,
    "acceptance": _number(0, 1),
    "end_rate": _number(0, 1),
}
_FIELDS = {
    "seed": "seed",
    "vocabulary": "vocabulary_size",
    "context": "context_limit",
    "acceptance": "acceptance",
    "end_rate": "end_rate",
}
