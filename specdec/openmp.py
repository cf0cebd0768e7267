"""Runs compiled kernels on the threads that torch computes with.

A second pool of threads beside torch's would fight it for the same cores, since idle OpenMP threads spin for a while.
So a kernel is handed to the very OpenMP runtime that torch brings: GNU's, whose entry point is part of its stable
binary interface. Without that runtime a kernel runs on the calling thread alone, with the same result.

A kernel is a `numba.cfunc` of one pointer to a record of arguments. It asks `part_index` and `num_parts` which share of
the work is its own; how work is shared must not change a result.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding
import torch
from numba import cfunc, from_dtype, types
from numba.extending import intrinsic
from numpy import dtype
from numpy.typing import NDArray

from specdec.kernel_cache import kept_by_content


def _load_runtime() -> ctypes.CDLL | None:
    try:
        runtime = ctypes.CDLL("libgomp.so.1")  # by this name the loader finds the one that torch has loaded
        runtime.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        runtime.GOMP_parallel.restype = None
        _name_symbol("specdec_part_index", runtime.omp_get_thread_num)
        _name_symbol("specdec_num_parts", runtime.omp_get_num_threads)
        _name_symbol("specdec_barrier", runtime.GOMP_barrier)
    except (OSError, AttributeError):
        return None
    return runtime


def _name_symbol(name: str, function: Any) -> None:
    # By name, since a kernel with an address in it could not be kept on disk.
    llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


_ONLY_PART, _ONE_PART = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
_name_symbol("specdec_part_index", _ONLY_PART)
_name_symbol("specdec_num_parts", _ONE_PART)
_NO_BARRIER = ctypes.CFUNCTYPE(None)(lambda: None)
_name_symbol("specdec_barrier", _NO_BARRIER)
_RUNTIME = _load_runtime()

part_index = types.ExternalFunction("specdec_part_index", types.int32())
"""Inside a kernel: which share of the work is the caller's, from 0."""
num_parts = types.ExternalFunction("specdec_num_parts", types.int32())
"""Inside a kernel: into how many shares the work is cut."""

barrier = types.ExternalFunction("specdec_barrier", types.void())
"""Inside a kernel: waits until every share has come here."""


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """Inside a kernel: an address, as a record of arguments holds it, as the pointer that `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uintp), generate


def kernel(arguments: dtype[Any]) -> Callable[[Callable[..., None]], Any]:
    """Decorates a kernel that takes a pointer to a record of this dtype. Compiled once, and kept where that can be."""
    signature = types.void(types.CPointer(from_dtype(arguments)))

    def compile_kernel(function: Callable[..., None]) -> Any:
        with kept_by_content(function) as can_be_kept:
            try:
                return cfunc(signature, cache=can_be_kept, nopython=True)(function)
            except OSError:  # no room to keep it
                return cfunc(signature, nopython=True)(function)

    return compile_kernel


@cache
def _as_function(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)  # numba would make one for every call


def run(compiled: Any, arguments: NDArray[Any], *, alone: bool = False) -> None:
    """Runs a kernel on one record of arguments, over torch's threads. The interpreter is free meanwhile.

    What the record points to must live until this returns. `alone` runs it on the calling thread: for work that is done
    before another thread has woken.
    """
    if alone or _RUNTIME is None:
        _as_function(compiled.address)(arguments.ctypes.data)
    else:
        _RUNTIME.GOMP_parallel(compiled.address, arguments.ctypes.data, torch.get_num_threads(), 0)
