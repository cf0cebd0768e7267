"""Does a process grow? A straight line through what was sampled, by the median of all slopes, which a few odd samples
do not move (Theil 1950, Sen 1968). Pure."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

_ALLOWED_SHARE = 0.03
_ALLOWED = {"rss_bytes": 4 << 20, "arena_bytes": 4 << 20, "num_fds": 3, "num_threads": 2}
"""Growth over the second half that still counts as flat: this much, or that share where it is more."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One process at one moment. `arena_bytes` is what malloc holds in memory, None where that cannot be told."""

    at_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int
    arena_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Growth:
    """Of one measure over the second half of the samples; `growth` is that of the line."""

    measure: str
    median: float
    growth: float
    per_hour: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed


def growth_of(samples: Sequence[Sample]) -> list[Growth]:
    """For every measure that the second half has at least three values of; the first half fills pools and caches."""
    second_half = samples[len(samples) // 2 :]
    growths = []
    for measure, allowed in _ALLOWED.items():
        points = [(one.at_s, value) for one in second_half if (value := getattr(one, measure)) is not None]
        if len(points) < 3:
            continue
        slope = median_slope(points)
        median = statistics.median(value for _, value in points)
        growth = slope * (points[-1][0] - points[0][0])
        growths.append(Growth(measure, median, growth, 3600 * slope, max(allowed, _ALLOWED_SHARE * median)))
    return growths


def median_slope(points: Sequence[tuple[float, float]]) -> float:
    """Of at least two points at different times."""
    return statistics.median(
        (later - earlier) / (later_s - earlier_s)
        for (earlier_s, earlier), (later_s, later) in itertools.combinations(points, 2)
        if later_s != earlier_s
    )
