"""How much memory keys and values may take where nobody has said.

Knows the machine's free memory; refuses to know what is cached.
"""

import os
from pathlib import Path

import torch

from specdec.model.kv_cache import CacheLayout

_SHARE_OF_HOST_MEMORY = 0.25
_SHARE_OF_DEVICE_MEMORY = 0.8  # what the weights have left; activations need the rest
_MOST_SESSIONS = 64
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_INFO = Path("/proc/meminfo")


def default_kv_budget_bytes(layout: CacheLayout) -> int:
    """A share of the memory that is free now, at most what 64 sessions of full context need."""
    if layout.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(layout.device)
        share = _SHARE_OF_DEVICE_MEMORY
    else:
        free_bytes, share = available_memory_bytes(), _SHARE_OF_HOST_MEMORY
    return min(int(free_bytes * share), _MOST_SESSIONS * layout.context_limit * layout.bytes_per_token)


def available_memory_bytes() -> int:
    """Of the machine, or of the container where that has a lower limit."""
    available = _available_on_the_machine_bytes()
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control groups here, or no limit ("max")
        return available
    return max(0, min(available, limit - used))


def _available_on_the_machine_bytes() -> int:
    try:
        fields = dict(line.split(":") for line in _MEMORY_INFO.read_text().splitlines())
        return int(fields["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
