"""What a figure was measured with: the commit and the machine. Reads, never runs anything but git."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_GIT_TIMEOUT_S = 10.0
_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "avx_vnni",
    "avx512_vnni",
    "asimddp",
    "bf16",
)
_TELLING_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "specdec")


def describe_commit(folder: Path) -> str:
    """The commit's hash, with `-dirty` where tracked files differ from it; empty outside a clone."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def describe_machine() -> dict[str, Any]:
    cpu = _read_fields(Path("/proc/cpuinfo"))
    memory_kb = _read_fields(Path("/proc/meminfo")).get("MemTotal", "0 kB").split()[0]
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "system": platform.platform(),
        "architecture": platform.machine(),
        "cpu": cpu.get("model name", platform.processor()),
        "num_cpus": _num_cpus(),
        "cpu_flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "memory_bytes": 1024 * int(memory_kb),
        "load_average_before": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
        "python": platform.python_version(),
        "packages": {name: version for name in _TELLING_PACKAGES if (version := _version(name))},
    }


def _num_cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_fields(path: Path) -> dict[str, str]:
    """`name : value` lines, the first of each name; empty where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
