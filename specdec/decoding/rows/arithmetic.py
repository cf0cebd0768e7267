"""The arithmetic of rows: maxima of blocks, exponentials, and the order of floating-point numbers as integers.

A row is looked at in blocks of BLOCK scores. Most of a row is far below its best score, and a block's maximum says so.

Shapes: N scores of a row, in ceil(N / BLOCK) blocks, the last one shorter where need be.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int32]

BLOCK = 64
IMPOSSIBLE = np.float32(-math.inf)
_NAN = np.float32(math.nan)


def exact(function: F) -> F:
    """Compiles a step whose every operation is rounded as it is written."""
    return njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def summing(function: F) -> F:
    """Compiles a step whose sums may be taken in another order, always the same for a row."""
    return njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})(function)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def float32_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that these 32 bits are."""
    return types.float32(types.int32), lambda _c, builder, _s, values: builder.bitcast(values[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float32(typing_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""
    return types.int32(types.float32), lambda _c, builder, _s, values: builder.bitcast(values[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def float64_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float64 that these 64 bits are."""
    return types.float64(types.int64), lambda _c, builder, _s, values: builder.bitcast(values[0], ir.DoubleType())


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float64(typing_context: Any, value: Any) -> Any:
    """The 64 bits of a float64."""
    return types.int64(types.float64), lambda _c, builder, _s, values: builder.bitcast(values[0], ir.IntType(64))


@exact
def rank_of(score: np.float32) -> np.int32:
    """An integer that is the greater, the greater the score."""
    bits = bits_of_float32(score)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@exact
def score_of(rank: np.int32) -> np.float32:
    """The score of this rank."""
    return float32_of_bits(rank ^ ((rank >> np.int32(31)) & np.int32(0x7FFFFFFF)))  # type: ignore[no-any-return]


@exact
def block_max(block: Floats) -> np.float32:
    """The greatest of some scores that are numbers."""
    best = rank_of(IMPOSSIBLE)
    for index in range(len(block)):
        best = max(best, rank_of(block[index]))
    return score_of(best)


@exact
def _block_max_or_nan(block: Floats) -> np.float32:
    """The greatest of some scores; NaN where one is that, of either sign: processors make negative ones."""
    best = worst = rank_of(IMPOSSIBLE)  # a NaN is beyond the infinity of its sign
    for index in range(len(block)):
        rank = rank_of(block[index])
        best, worst = max(best, rank), min(worst, rank)
    return score_of(best) if worst == rank_of(IMPOSSIBLE) else _NAN


@exact
def block_maxima(scores: Floats, maxima: Floats) -> np.float32:
    """Fills the maximum of every block; returns that of the row, NaN where any score is."""
    for block in range(len(maxima)):
        maxima[block] = _block_max_or_nan(scores[block * BLOCK : (block + 1) * BLOCK])
    return block_max(maxima)  # a NaN without a sign is greater than any number


_ROUNDER_32 = np.float32(1.5 * 2**23)
"""Added and taken away again, it leaves the nearest integer of a small float32."""
_LEAST_EXPONENT_32 = np.float32(-87.0)
_LOG2_E_32 = np.float32(1 / math.log(2))
_LN2_HIGH_32, _LN2_LOW_32 = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_32 = tuple(np.float32(1 / math.factorial(power)) for power in range(7, 1, -1))


@njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp32(x: np.float32) -> np.float32:
    """exp(x) of x <= 0 within 1e-7 relatively, and 1 at 0; 0 below -87.

    Taylor's series near 0, scaled by a power of 2.
    """
    bounded = max(x, _LEAST_EXPONENT_32)
    power = (bounded * _LOG2_E_32 + _ROUNDER_32) - _ROUNDER_32
    rest = (bounded - power * _LN2_HIGH_32) - power * _LN2_LOW_32  # within ln(2) / 2 of 0
    series = _EXP_32[0]
    series = series * rest + _EXP_32[1]
    series = series * rest + _EXP_32[2]
    series = series * rest + _EXP_32[3]
    series = series * rest + _EXP_32[4]
    series = series * rest + _EXP_32[5]
    series = (series * rest * rest + rest) + np.float32(1)
    scaled = series * float32_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
    return scaled if x >= _LEAST_EXPONENT_32 else np.float32(0)


_ROUNDER_64 = 1.5 * 2.0**52
_LEAST_EXPONENT_64 = -700.0
_LOG2_E_64 = 1 / math.log(2)
_LN2_HIGH_64, _LN2_LOW_64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_EXP_64 = tuple(1 / math.factorial(power) for power in range(13, 1, -1))


@njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp64(x: float) -> float:
    """exp(x) of x <= 0 within 1e-15 relatively, and 1 at 0; 0 below -700."""
    bounded = max(x, _LEAST_EXPONENT_64)
    shifted = bounded * _LOG2_E_64 + _ROUNDER_64
    power = shifted - _ROUNDER_64
    rest = (bounded - power * _LN2_HIGH_64) - power * _LN2_LOW_64
    series = _EXP_64[0]
    series = series * rest + _EXP_64[1]
    series = series * rest + _EXP_64[2]
    series = series * rest + _EXP_64[3]
    series = series * rest + _EXP_64[4]
    series = series * rest + _EXP_64[5]
    series = series * rest + _EXP_64[6]
    series = series * rest + _EXP_64[7]
    series = series * rest + _EXP_64[8]
    series = series * rest + _EXP_64[9]
    series = series * rest + _EXP_64[10]
    series = series * rest + _EXP_64[11]
    series = (series * rest * rest + rest) + 1.0
    exponent = bits_of_float64(shifted) - bits_of_float64(_ROUNDER_64)  # the integer, without a conversion
    scaled = series * float64_of_bits((exponent + 1023) << 52)
    return scaled if x >= _LEAST_EXPONENT_64 else 0.0
