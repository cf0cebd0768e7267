"""What a process holds: memory, what malloc keeps of it, file descriptors, threads. Reads, changes nothing."""

import time

import psutil

from specdec.bench.faults.growth import Sample

_HEAP_ALIGNMENT_BYTES = 64 << 20
"""glibc maps each heap of an arena at a multiple of this (HEAP_MAX_SIZE on 64 bits)."""


def take_sample(pid: int) -> Sample | None:
    """None where the process has ended, or is not ours to look at."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            rss_bytes, num_threads = process.memory_info().rss, process.num_threads()
        return Sample(time.monotonic(), rss_bytes, process.num_fds(), num_threads, _arena_bytes(process))
    except psutil.Error:
        return None


def _arena_bytes(process: "psutil.Process") -> int | None:
    """Resident bytes of the main arena, which is called [heap], and of the heaps of all others."""
    try:
        maps = process.memory_maps(grouped=False)
    except (psutil.Error, AttributeError):  # there is no such call outside Linux
        return None
    heaps = (one for one in maps if one.path == "[heap]" or (one.path == "[anon]" and _may_be_heap(one.addr)))
    return sum(int(one.rss) for one in heaps)


def _may_be_heap(address: str) -> bool:
    return int(address.partition("-")[0], 16) % _HEAP_ALIGNMENT_BYTES == 0
