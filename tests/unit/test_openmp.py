"""Kernels run over torch's own threads, and every part of the work is done once."""

import numpy as np
import torch
from numba import carray

from specdec import openmp

ARGUMENTS = np.dtype([("out", np.uintp), ("length", np.int64)], align=True)


@openmp.kernel(ARGUMENTS)
def _mark(arguments):
    record = carray(arguments, 1)[0]
    out = carray(openmp.pointer(record.out), (record.length,), np.int64)
    for index in range(openmp.part_index(), record.length, openmp.num_parts()):
        out[index] += 1 + openmp.part_index()


def test_every_item_is_done_once_by_some_thread_of_torchs():
    out = np.zeros(1000, dtype=np.int64)
    arguments = np.zeros(1, ARGUMENTS)
    arguments["out"], arguments["length"] = out.ctypes.data, len(out)
    openmp.run(_mark, arguments)
    assert set(out.tolist()) == set(range(1, 1 + torch.get_num_threads()))


def test_the_threads_are_those_of_torch():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) == 1
