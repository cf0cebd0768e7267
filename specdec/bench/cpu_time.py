"""CPU time of processes that are ours, from /proc: shows that those who should rest do rest. Linux alone, else None."""

import os
from collections.abc import Collection
from pathlib import Path

_PROC = Path("/proc")


def tree_cpu_s(root_pids: Collection[int]) -> float | None:
    """User and system seconds so far of these processes and all their descendants."""
    table = _read_table()
    if table is None:
        return None
    children: dict[int, list[int]] = {}
    for pid, (parent_pid, _) in table.items():
        children.setdefault(parent_pid, []).append(pid)
    total_s, waiting, seen = 0.0, list(root_pids), set[int]()
    while waiting:
        pid = waiting.pop()
        if pid in table and pid not in seen:
            seen.add(pid)
            total_s += table[pid][1]
            waiting += children.get(pid, [])
    return total_s


def _read_table() -> dict[int, tuple[int, float]] | None:
    """(parent's pid, CPU seconds) by pid."""
    if not (_PROC / "self" / "stat").exists():
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    table = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        fields = stat.rpartition(")")[2].split()  # from the third field on: the second, a name, may hold anything
        table[int(folder.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks_per_s)
    return table
