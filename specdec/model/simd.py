"""Eight float32 lanes as a value of compiled kernels, so that the order of every sum is written and not a compiler's.

Arrays may hold bfloat16 as its bits (uint16): loads widen, stores round to nearest even. Indices count from 0 and are
not checked. No function here is for interpreted code.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

LANES = 8

_FLOAT, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_FLOATS, _SHORTS, _WORDS = (ir.VectorType(lane, LANES) for lane in (_FLOAT, _I16, _I32))

EXP2_SERIES = tuple(
    np.float32(term)
    for term in (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
)
"""ln(2)**k / k! from k = 6 down to 0: of 2**x for |x| <= 1/2."""

compiled = njit(error_model="numpy")


class Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x8")


_VECTOR = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector_type: Vector) -> None:
        super().__init__(manager, vector_type, _FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """The eight elements from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype == types.float32:
            return _load(context, builder, array, arguments, _FLOATS)
        return widened(builder, _load(context, builder, array, arguments, _SHORTS))

    return _VECTOR(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(typing_context: Any, array: Any, index: Any, vector: Any) -> Any:
    """Into the eight elements from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, kind = arguments[2], _FLOATS
        if array.dtype != types.float32:
            lanes, kind = _round(builder, lanes, _WORDS, _SHORTS), _SHORTS
        address = builder.bitcast(_address(context, builder, array, arguments), kind.as_pointer())
        builder.store(lanes, address, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, _VECTOR), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_one(typing_context: Any, array: Any, index: Any) -> Any:
    """One element, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype == types.float32:
            return _load(context, builder, array, arguments, _FLOAT)
        bits = builder.zext(_load(context, builder, array, arguments, _I16), _I32)
        return builder.bitcast(builder.shl(bits, _I32(16)), _FLOAT)

    return types.float32(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_one(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """One float32 into one element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = arguments[2] if array.dtype == types.float32 else _round(builder, arguments[2], _I32, _I16)
        builder.store(element, _address(context, builder, array, arguments))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing_context: Any, value: Any) -> Any:
    """One float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return broadcast(builder, arguments[0])

    return _VECTOR(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend, rounded once where the processor can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "fmuladd", arguments)

    return _VECTOR(_VECTOR, _VECTOR, _VECTOR), generate


def _of_two(generate_lanes: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(typing_context: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return generate_lanes(builder, arguments[0], arguments[1])

        return _VECTOR(_VECTOR, _VECTOR), generate

    return intrinsic(typed)


def _maximum(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


add = _of_two(lambda builder, left, right: builder.fadd(left, right))
subtract = _of_two(lambda builder, left, right: builder.fsub(left, right))
multiply = _of_two(lambda builder, left, right: builder.fmul(left, right))
divide = _of_two(lambda builder, left, right: builder.fdiv(left, right))
maximum = _of_two(_maximum)
"""The larger of each lane; the right one where either is NaN."""


@intrinsic  # type: ignore[untyped-decorator]
def floor(typing_context: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "floor", arguments)

    return _VECTOR(_VECTOR), generate


@intrinsic  # type: ignore[untyped-decorator]
def magnitude(typing_context: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "fabs", arguments)

    return _VECTOR(_VECTOR), generate


@intrinsic  # type: ignore[untyped-decorator]
def with_sign_of(typing_context: Any, vector: Any, signs: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "copysign", arguments)

    return _VECTOR(_VECTOR, _VECTOR), generate


@intrinsic  # type: ignore[untyped-decorator]
def power_of_two(typing_context: Any, whole: Any) -> Any:
    """2 to the power of whole numbers in [-126, 127]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[0], _WORDS), _all(_WORDS, 127))
        return builder.bitcast(builder.shl(exponent, _all(_WORDS, 23)), _FLOATS)

    return _VECTOR(_VECTOR), generate


@intrinsic  # type: ignore[untyped-decorator]
def sums(
    typing_context: Any, v0: Any, v1: Any, v2: Any, v3: Any, v4: Any, v5: Any, v6: Any, v7: Any
) -> Any:  # fmt: skip
    """Lane i is the sum of the lanes of the i-th vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = list(arguments)
        # Each step adds neighbouring runs of lanes of two vectors side by side: 8 x 8 to 4 x (2 x 4), and so on.
        for evens, odds in (
            ((0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)),
            ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
            ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
        ):
            vectors = [
                builder.fadd(
                    builder.shuffle_vector(left, right, ir.Constant(_WORDS, evens)),
                    builder.shuffle_vector(left, right, ir.Constant(_WORDS, odds)),
                )
                for left, right in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        return vectors[0]

    return _VECTOR(*[_VECTOR] * LANES), generate


@intrinsic  # type: ignore[untyped-decorator]
def lane(typing_context: Any, vector: Any, index: Any) -> Any:
    """One lane, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], arguments[1])

    return types.float32(_VECTOR, types.int64), generate


@compiled  # type: ignore[untyped-decorator]
def largest_lane(vector: Any) -> Any:
    largest = lane(vector, 0)
    for index in range(1, LANES):
        largest = max(largest, lane(vector, index))
    return largest


@compiled  # type: ignore[untyped-decorator]
def sum_of_lanes(vector: Any) -> Any:
    left = (lane(vector, 0) + lane(vector, 1)) + (lane(vector, 2) + lane(vector, 3))
    right = (lane(vector, 4) + lane(vector, 5)) + (lane(vector, 6) + lane(vector, 7))
    return left + right


@compiled  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e to the x for x <= 0, within two units in the last place; never below 2**-126."""
    exponent = multiply(x, splat(np.float32(1.4426950408889634)))
    exponent = maximum(splat(np.float32(-126)), exponent)
    whole = floor(add(exponent, splat(np.float32(0.5))))
    rest = subtract(exponent, whole)
    series = splat(EXP2_SERIES[0])
    series = multiply_add(series, rest, splat(EXP2_SERIES[1]))
    series = multiply_add(series, rest, splat(EXP2_SERIES[2]))
    series = multiply_add(series, rest, splat(EXP2_SERIES[3]))
    series = multiply_add(series, rest, splat(EXP2_SERIES[4]))
    series = multiply_add(series, rest, splat(EXP2_SERIES[5]))
    series = multiply_add(series, rest, splat(EXP2_SERIES[6]))
    return multiply(series, power_of_two(whole))


@compiled  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    one = splat(np.float32(1))
    decay = exp(multiply(magnitude(x), splat(np.float32(-2))))
    return with_sign_of(divide(subtract(one, decay), add(one, decay)), x)


def widened(builder: Any, bits: Any) -> Any:
    """While code is generated: eight bfloat16, as their bits, to float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, _WORDS), _all(_WORDS, 16)), _FLOATS)


def broadcast(builder: Any, value: Any) -> Any:
    """While code is generated: one float32 in every lane."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, _all(_WORDS, 0))


def _all(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _call(builder: Any, name: str, arguments: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
    return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), arguments)


def _address(context: Any, builder: Any, array: Any, arguments: Any) -> Any:
    data = context.make_array(array)(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


def _load(context: Any, builder: Any, array: Any, arguments: Any, kind: Any) -> Any:
    address = builder.bitcast(_address(context, builder, array, arguments), kind.as_pointer())
    return builder.load(address, align=array.dtype.bitwidth // 8)


def _round(builder: Any, value: Any, word: Any, short: Any) -> Any:
    """float32 to the bits of bfloat16; one lane or all."""

    def constant(number: int) -> Any:
        return _all(word, number) if isinstance(word, ir.VectorType) else word(number)

    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), short)
