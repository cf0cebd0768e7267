"""What a server counts, read from its /metrics, and how much of it fell into one stretch of time."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0

Scrape = Mapping[str, float]
"""Values by name; series that differ in labels alone are summed. Histograms are there as `_sum` and `_count`."""


def scrape(endpoint: str) -> Scrape:
    """Raises OSError where nobody answers at host:port."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=_TIMEOUT_S) as response:
        return read_metrics(response.read().decode())


def read_metrics(text: str) -> Scrape:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def difference(before: Scrape, after: Scrape) -> Scrape:
    """How much was counted between the two. Of a gauge it says nothing."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def mean(counted: Scrape, histogram: str) -> float | None:
    """Of what a histogram observed; None where that is nothing."""
    count = counted.get(f"{histogram}_count", 0.0)
    return counted[f"{histogram}_sum"] / count if count else None
