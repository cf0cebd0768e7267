"""From what a campaign noted to the JSON that later work reads, and to tables for people. Pure."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specdec.bench.faults.judge import Promise
from specdec.bench.faults.records import FaultRecord
from specdec.bench.faults.recovery import recovery_times_s
from specdec.bench.faults.stream import Output


def build_campaign_report(
    faults: Sequence[FaultRecord], outputs: Sequence[Output], promises: Sequence[Promise], unix_offset_s: float
) -> dict[str, Any]:
    """`unix_offset_s` makes a time of day of a monotonic one, so that a fault can be found in the roles' logs."""
    by_kind: dict[str, list[FaultRecord]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind.name, []).append(fault)
    return {
        "kept": all(promise.num_broken == 0 for promise in promises),
        "promises": [
            {"name": one.name, "num_broken": one.num_broken, "examples": list(one.examples)} for one in promises
        ],
        "num_faults": len(faults),
        "num_outputs": len(outputs),
        "num_tokens": sum(len(output.token_ids) for output in outputs),
        "num_failovers": sum(output.num_failovers for output in outputs),
        "num_resumes": sum(len(output.breaks) for output in outputs),
        "stream_ends_by_reason": dict(Counter(each.reason for output in outputs for each in output.breaks)),
        "recovery": _recovery([time_s for fault in faults for time_s in recovery_times_s(fault)]),
        "kinds": {name: _of_kind(by_kind[name]) for name in sorted(by_kind)},
        "faults": [_fault(fault, unix_offset_s) for fault in sorted(faults, key=lambda one: one.began_s)],
        "broken_streams": [_broken(output, unix_offset_s) for output in outputs if output.breaks],
    }


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """What a person wants to know first, of `build_campaign_report`."""
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(report["stream_ends_by_reason"].items())) or "none"
    pauses = report["recovery"]
    lines = [
        f"{report['num_faults']} faults, {report['num_outputs']} outputs, {report['num_tokens']} tokens, "
        f"{report['num_failovers']} failovers; streams that ended at clients: {ends}"
    ]
    if pauses["num_pauses"]:
        lines.append(
            f"next token after a fault: median {pauses['median_s']:.2f} s, p99 {pauses['p99_s']:.2f} s, "
            f"at most {pauses['max_s']:.2f} s, of {pauses['num_pauses']}"
        )
    if num_broken := sum(promise["num_broken"] for promise in report["promises"]):
        lines.append(f"promises broken: {num_broken} times")
    elif report["num_faults"]:
        lines.append("every promise was kept")
    return lines


def _of_kind(faults: Sequence[FaultRecord]) -> dict[str, Any]:
    times_s = [time_s for fault in faults for time_s in recovery_times_s(fault)]
    return {
        "num_faults": len(faults),
        "num_affected_outputs": sum(len(fault.affected) for fault in faults),
        "num_breaks": sum(_num_breaks(fault) for fault in faults),
        "recovery": _recovery(times_s),
        "median_time_to_whole_s": statistics.median(fault.cleared_s - fault.began_s for fault in faults),
    }


def _num_breaks(fault: FaultRecord) -> int:
    """Streams of affected outputs that broke while the fault lasted."""
    return sum(fault.began_s <= each.at_s <= fault.cleared_s for output in fault.affected for each in output.breaks)


def _recovery(times_s: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "num_pauses": len(times_s),
        "median_s": statistics.median(times_s) if times_s else None,
        "p99_s": _percentile(times_s, 99),
        "max_s": max(times_s, default=None),
    }


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least so many percent of them do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


def _fault(fault: FaultRecord, unix_offset_s: float) -> dict[str, Any]:
    return {
        "number": fault.number,
        "kind": fault.kind.name,
        "target": fault.target,
        "source": fault.source,
        "began_unix_s": fault.began_s + unix_offset_s,
        "cleared_unix_s": fault.cleared_s + unix_offset_s,
        "affected_sessions": [output.session_id for output in fault.affected],
        "recovery_s": recovery_times_s(fault),
        "error": fault.error,
    }


def _broken(output: Output, unix_offset_s: float) -> dict[str, Any]:
    return {
        "session_id": output.session_id,
        "request": output.number,
        "asked_unix_s": output.asked_s + unix_offset_s,
        "num_tokens": len(output.token_ids),
        "error": output.error,
        "breaks": [
            {
                "at_unix_s": each.at_s + unix_offset_s,
                "orchestrator": each.orchestrator,
                "reason": each.reason,
                "message": each.message,
            }
            for each in output.breaks
        ],
    }


def promise_table(promises: Sequence[Promise]) -> Table:
    table = Table("promise", "broken", "for example")
    for promise in promises:
        style = "red" if promise.num_broken else ""
        table.add_row(
            promise.name, f"{promise.num_broken}", promise.examples[0] if promise.examples else "", style=style
        )
    return table


def kind_table(kinds: Mapping[str, dict[str, Any]]) -> Table:
    """Times are seconds: until the next token at an affected output, and until the whole system was back."""
    table = Table("fault")
    for heading in ("injected", "affected", "stream ends", "next token p50", "p99", "max", "whole again"):
        table.add_column(heading, justify="right")
    for name, kind in kinds.items():
        recovery = kind["recovery"]
        counts = (kind["num_faults"], kind["num_affected_outputs"], kind["num_breaks"])
        times_s = (recovery["median_s"], recovery["p99_s"], recovery["max_s"], kind["median_time_to_whole_s"])
        table.add_row(name, *map(str, counts), *("-" if time_s is None else f"{time_s:.2f}" for time_s in times_s))
    return table
