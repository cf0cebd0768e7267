"""Runs Triton's kernels where they can be run: on a CUDA device, or else interpreted on the CPU.

Import it before anything that imports a kernel; where there is no Triton, the importing tests are skipped.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

if not torch.cuda.is_available():
    import numpy as np
    from triton.language import bfloat16
    from triton.runtime import interpreter

    if isinstance(triton.language.sum, triton.JITFunction):
        pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)

    def _wide(operand: interpreter.TensorHandle) -> interpreter.TensorHandle:
        """Triton 3.7's interpreter multiplies the bits of bfloat16 numbers. Their products are exact in float32."""
        if operand.dtype.scalar != bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), triton.language.float32)

    _create_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: _create_dot(self, _wide(a), _wide(b), *rest)

    _prepared: set[int] = set()

    def _call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        """Prepares the language for `tl.sum` and its like once. The interpreter does so at each call, for 10 ms."""
        if id(function.fn.__globals__) not in _prepared:
            interpreter._patch_lang(function.fn)
            _prepared.add(id(function.fn.__globals__))
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
