"""From what a soak noted to JSON and to a table for people. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specdec.bench.faults.growth import Growth, Sample, growth_of
from specdec.bench.faults.records import LeftOver

_SHOWN = 20


def build_soak_report(
    samples: Mapping[str, Sequence[Sample]],
    endings: Mapping[str, int],
    defects: Sequence[str],
    left_over: LeftOver,
    not_judged: str,
) -> dict[str, Any]:
    """`not_judged` names the process that plays the clients: it is told, but it is no part of the system."""
    growths = {name: growth_of(taken) for name, taken in samples.items()}
    judged = [(name, growth) for name, found in growths.items() for growth in found if name != not_judged]
    grown = [f"{name} {growth.measure}" for name, growth in judged if not growth.flat]
    return {
        "flat": not grown,
        "clean": not defects and left_over == LeftOver(),
        "grown": grown,
        "requests": dict(endings),
        "num_defects": len(defects),
        "defects": list(defects[:_SHOWN]),
        "left_over": dataclasses.asdict(left_over),
        "growth": {name: [_growth(growth) for growth in found] for name, found in growths.items()},
        "samples": {name: [dataclasses.asdict(sample) for sample in taken] for name, taken in samples.items()},
    }


def _growth(growth: Growth) -> dict[str, Any]:
    return {**dataclasses.asdict(growth), "flat": growth.flat}


def growth_table(growths: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Over the second half; bytes in MB."""
    table = Table("process", "measure")
    for heading in ("median", "growth", "an hour", "allowed", "flat"):
        table.add_column(heading, justify="right")
    for name, found in growths.items():
        for growth in found:
            unit = 1e6 if growth["measure"].endswith("_bytes") else 1
            numbers = (growth[key] / unit for key in ("median", "growth", "per_hour", "allowed"))
            flat = "yes" if growth["flat"] else "NO"
            table.add_row(name, growth["measure"], *(f"{number:.1f}" for number in numbers), flat)
    return table
