"""From the cells of a load benchmark to the JSON that later work reads. Pure; `load_figures` defines each figure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.bench import figures
from specdec.bench.load_figures import ForwardTime, cell_figures, num_mismatching
from specdec.bench.load_plan import TARGET_ONLY
from specdec.bench.load_run import CellRecord

_SHOWN_ERRORS = 5


@dataclasses.dataclass
class LoadRecording:
    """Grows while a benchmark runs; whatever it holds can be reported at any time."""

    commit: str
    machine: Mapping[str, Any]
    settings: dict[str, Any]
    cells: list[CellRecord] = dataclasses.field(default_factory=list)
    profiles: dict[str, Any] = dataclasses.field(default_factory=dict)
    complete: bool = False
    ended_by: str = ""


def build_load_report(recording: LoadRecording, forward_time: ForwardTime | None) -> dict[str, Any]:
    """One object: `runs` has an entry for each number of streams and way, medians over repetitions; `cells` has all."""
    target_only = {
        (record.cell.repetition, record.cell.num_streams): record
        for record in recording.cells
        if record.cell.lane is None
    }
    cells = []
    for record in recording.cells:
        alone = target_only.get((record.cell.repetition, record.cell.num_streams))
        measured = cell_figures(record, forward_time)
        measured["num_mismatching_outputs"] = 0 if alone is None else num_mismatching(record, alone)
        measured["over_target_only"] = None if alone is None else _speedup(measured, cell_figures(alone, None))
        cells.append(measured)
    return {
        "commit": recording.commit,
        "machine": dict(recording.machine),
        "settings": dict(recording.settings),
        "complete": recording.complete,
        "ended_by": recording.ended_by,
        "runs": _runs(cells),
        "num_mismatching_outputs": sum(cell["num_mismatching_outputs"] for cell in cells),
        "num_errors": sum(cell["num_errors"] for cell in cells),
        "errors": sorted({error for record in recording.cells for error in record.errors})[:_SHOWN_ERRORS],
        "profiles": dict(recording.profiles),
        "cells": cells,
    }


def _runs(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["num_streams"], cell["label"]), []).append(cell)
    order = sorted(groups, key=lambda group: (group[0], group[1] != TARGET_ONLY))
    return [_median_of([*groups[group]]) for group in order]


def _median_of(values: Sequence[Any]) -> Any:
    """Of numbers the median, of objects the same by each of their names, of anything else the first."""
    first = values[0]
    if isinstance(first, dict):
        return {
            name: sum(value[name] for value in values)
            if name in ("num_mismatching_outputs", "num_errors")
            else _median_of([value.get(name) for value in values])
            for name in first
            if name != "repetition"
        }
    if any(isinstance(value, str) for value in values):
        return first
    return figures.median(values)


def _speedup(measured: Mapping[str, Any], alone: Mapping[str, Any]) -> float | None:
    """By the steady rate where both have one: neither the first prefill nor the last stragglers count."""
    rate = "steady_tokens_per_s" if measured["steady_tokens_per_s"] and alone["steady_tokens_per_s"] else "tokens_per_s"
    return measured[rate] / alone[rate] if alone[rate] else None
