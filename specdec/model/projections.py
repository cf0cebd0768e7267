"""Projections of the same input as one matrix product: queries, keys and values; gate and up.

Modelling code calls them one by one. The first call computes all, and the others are handed their slice as long as they
ask with the very same tensor. Knows modules and their names; refuses to know which model they belong to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.model.activations import GatedActivation
from specdec.model.linear import RowLinear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

MakeLinear = Callable[[Tensor, Tensor | None], RowLinear]


class SharedProduct:
    """One product for a group of projections, and what is left of it to hand out."""

    def __init__(self, linear: RowLinear, num_slices: int) -> None:
        self.linear, self.num_slices = linear, num_slices
        self._input: Tensor | None = None
        self._product: Tensor | None = None
        self._taken: set[int] = set()

    def take(self, index: int, x: Tensor) -> Tensor:
        """The whole product for x. It is computed anew for another tensor, and for a slice that was taken before."""
        if self._product is None or self._input is not x or index in self._taken:
            self._input, self._product, self._taken = x, self.linear(x), set()
        product = self._product
        self._taken.add(index)
        if len(self._taken) == self.num_slices:
            self._input = self._product = None
        return product


class ProjectionSlice(nn.Module):
    """Stands in for one projection of a group: [..., I] to its columns of the product."""

    def __init__(self, shared: SharedProduct, index: int, first_column: int, num_columns: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index
        self.first_column, self.num_columns = first_column, num_columns
        self.linear = shared.linear  # found by who looks through the model's modules

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.take(self.index, x).narrow(-1, self.first_column, self.num_columns)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: RowLinear, activation: GatedActivation, down: RowLinear) -> None:
        super().__init__()
        self.gate_up, self.activation, self.down = gate_up, activation, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))  # type: ignore[no-any-return]


def fuse_projections(parent: nn.Module, names: Sequence[str], make_linear: MakeLinear) -> bool:
    """Swaps the named children of a module for slices of one product, and frees their weights.

    Does nothing, and returns False, unless all are plain linears of the same inputs and dtype.
    """
    linears = [linear for name in names if type(linear := getattr(parent, name, None)) is nn.Linear]
    alike = {(linear.in_features, linear.weight.dtype, linear.weight.device) for linear in linears}
    if len(linears) != len(names) or len(alike) != 1:
        return False
    shared = SharedProduct(make_linear(*_stacked(linears)), len(names))
    end = 0
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        start, end = end, end + linear.out_features
        setattr(parent, name, ProjectionSlice(shared, index, start, end - start))
    return True


def gated_mlp(module: nn.Module, make_linear: MakeLinear, *, on_cpu: bool) -> GatedMLP | None:
    """A module in place of a gated MLP as most models have it. None for a module that is not one."""
    if not looks_like_gated_mlp(module):
        return None
    gate_up = make_linear(*_stacked([module.get_submodule("gate_proj"), module.get_submodule("up_proj")]))
    down = module.get_submodule("down_proj")
    activation = GatedActivation(module.get_submodule("act_fn"), on_cpu=on_cpu)
    return GatedMLP(gate_up, activation, make_linear(*_stacked([down])))


def looks_like_gated_mlp(module: nn.Module) -> bool:
    """By its children and parameters; `computes_gated_mlp` tells whether it is one."""
    children = dict(module.named_children())
    return (
        set(children) == _GATED_MLP
        and all(type(children[name]) is nn.Linear for name in _GATED_MLP - {"act_fn"})
        and not list(module.parameters(recurse=False))
        and not module._forward_hooks
    )


@torch.inference_mode()
def computes_gated_mlp(module: nn.Module) -> bool:
    """Whether a module with those children uses them as usual, tried on numbers. Some make activations sparse."""
    parts: Any = module
    gate, up, down, activation = parts.gate_proj, parts.up_proj, parts.down_proj, parts.act_fn
    probe = torch.linspace(-2.0, 2.0, gate.weight.shape[1])[None].to(gate.weight)
    expected = down(activation(gate(probe)) * up(probe))
    return torch.allclose(module(probe), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def _stacked(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one below the other; zeros for a bias that only some of them have."""
    weights: list[Any] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears]
    weight = weights[0].data if len(weights) == 1 else torch.cat([weight.data for weight in weights])
    if all(bias is None for bias in biases):
        return weight, None
    filled = [w.new_zeros(len(w)) if b is None else b.data for w, b in zip(weights, biases, strict=True)]
    return weight, torch.cat(filled)
