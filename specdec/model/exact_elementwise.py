"""Elementwise functions that modelling code calls by itself, run so that a row's bits do not depend on its neighbours.

torch cuts wide elementwise work between threads at places that depend on the number of rows, and what is left at a
thread's end goes through scalar code whose exponential differs in the last bit. Modules of that kind are swapped at
load; calls of functions can only be caught as they are made. Knows torch's operators; refuses to know the model.

Legend: M rows, F features.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.errors import ModelLoadError
from specdec.model.activations import VECTORS, in_row_blocks

_OF_ONE_TENSOR = {
    "sigmoid", "expit", "silu", "gelu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid", "tanh", "logit",
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "erf", "erfc", "erfinv", "ndtr", "lgamma",
    "digamma", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc",
}  # fmt: skip
_REFUSED = {
    "atan2", "hypot", "logaddexp", "logaddexp2", "logsumexp", "xlogy", "xlog1py", "polar", "float_power", "glu",
}  # fmt: skip
_ALONG_ROWS = {"softmax", "log_softmax"}  # each row by itself, where they run along the last dimension
_EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""torch takes these by products, quotients and roots, which are rounded alike in vectors and alone."""


class ExactElementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, transcendental functions of CPU tensors are computed in blocks of rows that torch does not cut."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.was_needed = False
        """Whether such a function was called on more than a constant, outside our own modules."""
        self._num_own_modules = 0

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Active for one forward at load, which shows whether the model needs this in every forward.

        Raises ModelLoadError, within, for a function that is not known to run row by row.
        """
        own = [module for module in model.modules() if type(module).__module__.startswith("specdec.")]
        hooks = [module.register_forward_pre_hook(self._enter_own) for module in own]
        hooks += [module.register_forward_hook(self._leave_own) for module in own]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._num_own_modules = 0

    def _enter_own(self, _module: nn.Module, _inputs: Any) -> None:
        self._num_own_modules += 1

    def _leave_own(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._num_own_modules -= 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        kind = name.removeprefix("special_").removesuffix("_")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if (
            self._num_own_modules
            or not any(tensor.is_cpu and tensor.is_floating_point() and tensor.dim() for tensor in tensors)
            or _is_exact(kind, args)
        ):
            return function(*args, **kwargs)
        if kind not in _OF_ONE_TENSOR or len(tensors) > 1 or tensors[0] is not args[0]:
            raise ModelLoadError(f"modelling code calls {kind} in a way that lets a row's bits depend on other rows")
        self.was_needed = True
        exact = _in_whole_vectors(getattr(torch.ops.aten, name.removesuffix("_")), args, kwargs)
        return args[0].copy_(exact) if function._schema.is_mutable else exact


def _is_exact(kind: str, args: Sequence[Any]) -> bool:
    """Whether torch gives a row the same bits in any case."""
    if kind == "pow" and not isinstance(args[1], Tensor):
        return args[1] in _EXACT_POWERS
    if kind in _ALONG_ROWS:
        return args[1] in (-1, args[0].dim() - 1)
    return kind not in _OF_ONE_TENSOR and kind not in _REFUSED


def _in_whole_vectors(function: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    x, *options = args
    width = x.shape[-1]
    filled = F.pad(x, (0, -width % VECTORS))  # blocks of many rows, then, and none ends within a vector
    return in_row_blocks(lambda block: function(block, *options, **kwargs), filled)[..., :width].contiguous()
