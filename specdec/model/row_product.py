"""A matrix product whose rows do not know of each other: any number of rows, in any place, gives a row the same bits.

Every output is one chain of fused multiply-adds over the inputs in their order. Neither the number of rows nor of
threads has a part in it, and since a fused multiply-add is rounded once everywhere, neither has the processor.

Weights are read once for all rows, as they are stored (float16, bfloat16 or float32), and widened in registers. They
lie in panels of 24 outputs, so that four rows keep twelve vectors of sums in registers: enough to hide the latency of
the multiply-add, with little reloading. Inputs are taken in blocks that stay in the nearest cache while the groups of
rows pass over them; a thread reads its panels as one stream. While the groups compute with one block of weights, the
next one is fetched: else memory would rest for as long as the second group of rows computes.

Legend: M rows, I inputs, O outputs, P panels.
"""

from typing import Any, Literal

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from specdec import openmp
from specdec.model.simd import LANES, broadcast, widened

ROW_PRODUCT_KERNEL = "independent-rows v1"
"""Name and version: the version rises with every change that can change a bit."""
PANEL = 24
_INPUT_BLOCK, _ROW_BLOCK = 256, 96
_FORMATS = (torch.float16, torch.bfloat16, torch.float32)
_JOB = np.dtype(
    [
        *((name, np.int64) for name in ("x", "weights", "bias", "out", "scratch")),  # addresses; bias may be 0
        *((name, np.int64) for name in ("rows", "inputs", "outputs", "x_stride", "format")),  # stride in bytes
    ],
    align=True,
)
_X, _OUT, _SCRATCH, _ROWS, _X_STRIDE = (
    (_JOB.names or ()).index(name) for name in ("x", "out", "scratch", "rows", "x_stride")
)
_WORK_OF_ONE_THREAD = 1 << 16  # multiply-adds that take no longer than waking a second thread
_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_BYTES = ir.IntType(8).as_pointer()
_TO_READ_IN_SECOND_CACHE = [_INT32(0), _INT32(2), _INT32(1)]  # no write, locality, data
_Format = Literal["float16", "bfloat16", "float32"]


def _load_weights(builder: Any, address: Any, stored: _Format) -> Any:
    if stored == "float32":
        return builder.load(_at(builder, address, _VECTOR), align=4)
    element = ir.HalfType() if stored == "float16" else ir.IntType(16)
    vector = builder.load(_at(builder, address, ir.VectorType(element, LANES)), align=2)
    if stored == "float16":
        return builder.fpext(vector, _VECTOR)
    return widened(builder, vector)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _tile(num_rows: int, stored: _Format) -> Any:
    """Adds the products of `num_rows` rows of x with a block of a panel to sums [num_rows, PANEL] in memory.

    The compiled function takes addresses, strides in bytes, the number of inputs in the block, whether the sums start
    from zero, and what it fetches meanwhile: from which address on, and how many bytes for each input.
    """
    num_vectors = PANEL // LANES
    item_size = 4 if stored == "float32" else 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, weights, num_inputs, sums, sums_stride, from_zero, ahead, ahead_step = arguments
        module, function = builder.function.module, builder.function
        multiply_add = cgutils.get_or_insert_function(
            module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )
        prefetch = cgutils.get_or_insert_function(
            module, ir.FunctionType(ir.VoidType(), [_BYTES, *[_INT32] * 3]), "llvm.prefetch.p0i8"
        )
        rows = [builder.add(x, builder.mul(x_stride, _INT64(row))) for row in range(num_rows)]
        places = [
            builder.add(builder.add(sums, builder.mul(sums_stride, _INT64(row))), _INT64(4 * LANES * vector))
            for row in range(num_rows)
            for vector in range(num_vectors)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        with builder.if_else(builder.icmp_signed("!=", from_zero, _INT64(0))) as (start, go_on):
            with start:
                start_block = builder.block
            with go_on:
                stored_sums = [builder.load(_at(builder, place, _VECTOR), align=4) for place in places]
                go_on_block = builder.block
        first = [builder.phi(_VECTOR) for _ in places]
        for phi, stored_sum in zip(first, stored_sums, strict=True):
            phi.add_incoming(zero, start_block)
            phi.add_incoming(stored_sum, go_on_block)

        before = builder.block
        loop, done = function.append_basic_block("inputs"), function.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(_INT64)
        running = [builder.phi(_VECTOR) for _ in places]
        panel_row = builder.add(weights, builder.mul(index, _INT64(PANEL * item_size)))
        loaded = [
            _load_weights(builder, builder.add(panel_row, _INT64(LANES * item_size * vector)), stored)
            for vector in range(num_vectors)
        ]
        wanted = builder.inttoptr(builder.add(ahead, builder.mul(index, ahead_step)), _BYTES)
        builder.call(prefetch, [wanted, *_TO_READ_IN_SECOND_CACHE])
        offset = builder.mul(index, _INT64(4))
        added = []
        for row in range(num_rows):
            element = builder.load(_at(builder, builder.add(rows[row], offset), _FLOAT), align=4)
            repeated = broadcast(builder, element)
            for vector in range(num_vectors):
                terms = [repeated, loaded[vector], running[row * num_vectors + vector]]
                added.append(builder.call(multiply_add, terms))
        following = builder.add(index, _INT64(1))
        index.add_incoming(_INT64(0), before)
        index.add_incoming(following, loop)
        for phi, initial, total in zip(running, first, added, strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", following, num_inputs), loop, done)
        builder.position_at_end(done)
        for place, total in zip(places, added, strict=True):
            builder.store(total, _at(builder, place, _VECTOR), align=4)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typing_context: Any, x: Any, x_stride: Any, weights: Any, num_inputs: Any, sums: Any, sums_stride: Any,
             from_zero: Any, ahead: Any, ahead_step: Any) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 9), generate

    return tile


_half_1, _half_2, _half_3, _half_4 = (_tile(rows, "float16") for rows in (1, 2, 3, 4))
_brain_1, _brain_2, _brain_3, _brain_4 = (_tile(rows, "bfloat16") for rows in (1, 2, 3, 4))
_full_1, _full_2, _full_3, _full_4 = (_tile(rows, "float32") for rows in (1, 2, 3, 4))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _add_block(
    stored: Any, rows: Any, x: Any, x_stride: Any, weights: Any, inputs: Any, sums: Any, sums_stride: Any, zero: Any
) -> None:
    """All rows over one block of a panel, in groups of four; five rows as three and two, six as three and three."""
    row = 0
    size = PANEL * (4 if stored == 2 else 2)
    groups = (rows + 3) // 4
    step = (size + groups - 1) // groups  # each group fetches its part of the next block
    ahead = weights + inputs * size
    while row < rows:
        left = rows - row
        here, there = x + row * x_stride, sums + row * sums_stride
        group = 4 if left == 4 or left > 6 else min(left, 3)
        if stored == 0:
            if group == 4:
                _half_4(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            elif group == 3:
                _half_3(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            elif group == 2:
                _half_2(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            else:
                _half_1(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        elif stored == 1:
            if group == 4:
                _brain_4(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            elif group == 3:
                _brain_3(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            elif group == 2:
                _brain_2(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
            else:
                _brain_1(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        elif group == 4:
            _full_4(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        elif group == 3:
            _full_3(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        elif group == 2:
            _full_2(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        else:
            _full_1(here, x_stride, weights, inputs, there, sums_stride, zero, ahead, step)
        row += group
        ahead += inputs * step


@openmp.kernel(_JOB)
def _multiply(arguments: Any) -> None:
    job = carray(arguments, 1)[0]
    part, parts = np.int64(openmp.part_index()), np.int64(openmp.num_parts())
    item_size = 4 if job.format == 2 else 2
    num_panels = (job.outputs + PANEL - 1) // PANEL
    scratch_address = job.scratch + part * (_ROW_BLOCK * PANEL * 4)
    scratch = carray(openmp.pointer(np.uintp(scratch_address)), (_ROW_BLOCK, PANEL), np.float32)
    out = carray(openmp.pointer(np.uintp(job.out)), (job.rows, job.outputs), np.float32)
    bias = carray(openmp.pointer(np.uintp(job.bias)), (job.outputs,), np.float32)
    for first_row in range(0, job.rows, _ROW_BLOCK):
        rows = min(_ROW_BLOCK, job.rows - first_row)
        for panel in range(num_panels * part // parts, num_panels * (part + 1) // parts):
            first_output = panel * PANEL
            width = min(PANEL, job.outputs - first_output)
            sums, sums_stride = job.out + 4 * (first_row * job.outputs + first_output), 4 * job.outputs
            if width < PANEL:  # the padding outputs of the last panel have no place in `out`
                sums, sums_stride = scratch_address, np.int64(4 * PANEL)
            for first_input in range(0, job.inputs, _INPUT_BLOCK):
                _add_block(
                    job.format,
                    rows,
                    job.x + first_row * job.x_stride + 4 * first_input,
                    job.x_stride,
                    job.weights + (panel * job.inputs + first_input) * (PANEL * item_size),
                    min(_INPUT_BLOCK, job.inputs - first_input),
                    sums,
                    sums_stride,
                    np.int64(first_input == 0),
                )
            if width < PANEL:
                for row in range(rows):
                    for output in range(width):
                        out[first_row + row, first_output + output] = scratch[row, output]
            if job.bias != 0:
                for row in range(first_row, first_row + rows):
                    for output in range(first_output, first_output + width):
                        out[row, output] += bias[output]


class PackedWeights:
    """Weights [O, I] in panels, kept in the dtype they come in, and a bias [O]. For one thread at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raises ValueError for a dtype that is neither float16, bfloat16 nor float32."""
        if weight.dtype not in _FORMATS:
            raise ValueError(f"weights of {weight.dtype} have no kernel")
        self.num_outputs, self.num_inputs = weight.shape
        self._bias = None if bias is None else bias.float().contiguous()
        self._panels = _panels(weight)
        self._scratch = torch.empty(0)
        self._job = np.zeros(1, _JOB)
        self._job["weights"], self._job["bias"] = self._panels.ctypes.data, self._bias_address()
        self._job["inputs"], self._job["outputs"] = self.num_inputs, self.num_outputs
        self._job["format"] = _FORMATS.index(weight.dtype)
        # Named fields of a record take longer to set than a small product takes to compute.
        self._numbers = self._job.view(np.int64)
        self._work_per_row = self.num_inputs * self.num_outputs

    def multiply(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O], both float32: x @ weight.T + bias."""
        out = torch.empty(*x.shape[:-1], self.num_outputs)
        num_rows, row_stride = x.numel() // self.num_inputs, self.num_inputs
        if x.dtype != torch.float32 or not x.is_contiguous():
            x = x.reshape(num_rows, self.num_inputs).float()
            if x.stride(1) != 1:
                x = x.contiguous()
            row_stride = x.stride(0)
        numbers = self._numbers
        numbers[_X], numbers[_X_STRIDE], numbers[_ROWS] = x.data_ptr(), 4 * row_stride, num_rows
        numbers[_OUT] = out.data_ptr()
        if self.num_outputs % PANEL:
            numbers[_SCRATCH] = self._scratch_address()
        openmp.run(_multiply, self._job, alone=num_rows * self._work_per_row < _WORK_OF_ONE_THREAD)
        return out

    def _scratch_address(self) -> int:
        size = torch.get_num_threads() * _ROW_BLOCK * PANEL
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        return self._scratch.data_ptr()

    def _bias_address(self) -> int:
        return 0 if self._bias is None else self._bias.data_ptr()


def _panels(weight: Tensor) -> Any:
    """[P, I, PANEL] as raw bits, the outputs of the last panel padded with zeros. numpy asks for huge pages."""
    raw = torch.int32 if weight.dtype == torch.float32 else torch.int16
    num_outputs, num_inputs = weight.shape
    num_panels, full = -(-num_outputs // PANEL), num_outputs // PANEL
    panels = np.empty((num_panels, num_inputs, PANEL), np.dtype(str(raw).removeprefix("torch.")))
    bits, target = weight.contiguous().view(raw), torch.from_numpy(panels)
    target[:full] = bits[: full * PANEL].view(full, PANEL, num_inputs).transpose(1, 2)
    if full < num_panels:
        target[full] = 0
        target[full, :, : num_outputs - full * PANEL] = bits[full * PANEL :].T
    return panels
