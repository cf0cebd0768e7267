"""Arithmetic inside compiled kernels: bfloat16 as its bits, exponential and hyperbolic tangent that LLVM can vectorise.

Everything is float32; the last bits are this code's own, not libm's.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

FAST_MATH = {"contract", "reassoc", "nsz"}
"""Sums may be reordered, once, when a kernel is compiled. Infinities and NaN keep their meaning."""

compiled = njit(fastmath=FAST_MATH, error_model="numpy")


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def widen(element: Any) -> Any:
    """A float32, or the 16 bits of a bfloat16, as float32."""
    raise NotImplementedError("for compiled code")


@overload(widen, inline="always")  # type: ignore[untyped-decorator]
def _widen(element: Any) -> Any:
    if element == types.float32:

        def widen_float(element: Any) -> Any:
            return element

        return widen_float

    def widen_bfloat16(element: Any) -> Any:
        return float_of_bits(np.uint32(np.uint32(element) << np.uint32(16)))

    return widen_bfloat16


def put(array: Any, index: Any, value: Any) -> None:
    """Stores a float32 in an array of float32, or of bfloat16 bits, rounded to nearest even."""
    raise NotImplementedError("for compiled code")


@overload(put, inline="always")  # type: ignore[untyped-decorator]
def _put(array: Any, index: Any, value: Any) -> Any:
    if array.dtype == types.float32:

        def put_float(array: Any, index: Any, value: Any) -> None:
            array[index] = value

        return put_float

    def put_bfloat16(array: Any, index: Any, value: Any) -> None:
        bits = bits_of_float(value)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(bits + np.uint32(0x7FFF) + odd)
        array[index] = np.uint16(rounded >> np.uint32(16)) if value == value else np.uint16(0x7FC0)

    return put_bfloat16


@compiled  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e to the x for x <= 0, within two units in the last place; never below 2**-126."""
    exponent = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    whole = np.floor(exponent + np.float32(0.5))
    rest = exponent - whole
    # The series of 2**rest, |rest| <= 1/2: ln(2)**k / k!
    series = np.float32(1.5403530e-4)
    series = series * rest + np.float32(1.3333558e-3)
    series = series * rest + np.float32(9.6181291e-3)
    series = series * rest + np.float32(5.5504109e-2)
    series = series * rest + np.float32(2.4022651e-1)
    series = series * rest + np.float32(6.9314718e-1)
    series = series * rest + np.float32(1.0)
    return series * float_of_bits(np.uint32(np.int32(np.int32(whole) + np.int32(127)) << np.int32(23)))


@compiled  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    decay = exp(np.float32(-2.0) * abs(x))
    size = (np.float32(1.0) - decay) / (np.float32(1.0) + decay)
    return size if x >= 0 else -size
