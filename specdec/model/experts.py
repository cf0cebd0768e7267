"""Mixtures of experts on exact row counts: routing decides how many rows an expert gets, not their bits.

Knows how transformers keeps experts: weights of three dimensions, and attributes that say how they are laid out.
Routers keep a bare matrix. Refuses to know which model they belong to.

Legend: M rows, E experts, T experts of a row, H hidden, S = M * T rows of all experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ModelLoadError
from specdec.model.activations import GatedActivation, RowActivation, activate
from specdec.model.linear import RowLinear
from specdec.model.projections import MakeLinear
from specdec.model.row_counts import split_rows

_LAYOUT = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")


def is_experts(module: nn.Module) -> bool:
    """Whether a module says of itself how its experts' weights are laid out."""
    return all(hasattr(module, name) for name in _LAYOUT) and hasattr(module, "_apply_gate")


class RowExperts(nn.Module):
    """Every expert on its own rows. A row's experts are added in the order in which the router ranked them."""

    def __init__(self, source: nn.Module, make_linear: MakeLinear, *, on_cpu: bool) -> None:
        """Takes the weights out of `source`, and keeps it for its gate and its norm. Raises ModelLoadError."""
        super().__init__()
        layout: Any = source
        first = "gate_up_proj" if layout.has_gate else "up_proj"
        known = {first, "down_proj", *((f"{first}_bias", "down_proj_bias") if layout.has_bias else ())}
        if {name for name, _ in source.named_parameters(recurse=False)} != known:
            raise ModelLoadError(f"experts of {type(source).__name__} are kept in a way that is not known here")
        self.num_experts: int = layout.num_experts
        self.first = nn.ModuleList(_linears(source, first, layout, make_linear))
        self.second = nn.ModuleList(_linears(source, "down_proj", layout, make_linear))
        for name in known:
            delattr(source, name)
        self.source = source
        self.between = _between(layout, on_cpu=on_cpu)
        self.after: Callable[[Tensor], Tensor] | None = layout.post_expert_norm if layout.has_post_expert_norm else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[M, H], experts [M, T] and their weights [M, T] to [M, H]."""
        num_rows, per_row = top_k_index.shape
        expert_ids = top_k_index.reshape(-1)  # [S]
        order = torch.argsort(expert_ids, stable=True)  # [S]
        chosen = hidden_states[order // per_row]  # [S, H], an expert's rows next to each other
        products = torch.empty_like(chosen)
        start = 0
        for expert, count in enumerate(torch.bincount(expert_ids, minlength=self.num_experts).tolist()):
            if count:
                rows = slice(start, start + count)
                products[rows] = self.second[expert](self.between(self.first[expert](chosen[rows])))
                start += count
        if self.after is not None:
            products = self.after(products)
        weighted = torch.empty_like(products)
        weighted[order] = products
        terms = weighted.view(num_rows, per_row, -1) * top_k_weights.to(products.dtype)[..., None]  # [M, T, H]
        total = terms[:, 0].clone()
        for rank in range(1, per_row):
            total += terms[:, rank]
        return total


def _linears(source: nn.Module, name: str, layout: Any, make_linear: MakeLinear) -> list[RowLinear]:
    weights = getattr(source, name).data  # [E, O, I], or [E, I, O] where transposed
    biases = getattr(source, f"{name}_bias").data if layout.has_bias else [None] * len(weights)
    return [
        make_linear((weight.T if layout.is_transposed else weight).contiguous(), bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _between(layout: Any, *, on_cpu: bool) -> Callable[[Tensor], Tensor]:
    """From the first product of an expert to the input of its second."""
    activation = getattr(layout, "act_fn", None)
    if not layout.has_gate:
        if not isinstance(activation, nn.Module):
            raise ModelLoadError(f"experts of {type(layout).__name__} have an activation that is not known here")
        return RowActivation(activation) if on_cpu else activation
    if isinstance(activation, nn.Module) and _gates_as_usual(layout):
        return GatedActivation(activation, on_cpu=on_cpu)
    return _RowByRow(layout._apply_gate) if on_cpu else layout._apply_gate


def _gates_as_usual(layout: Any) -> bool:
    probe = torch.linspace(-3.0, 3.0, 64)[None]
    gate, up = probe.chunk(2, dim=-1)
    return torch.allclose(layout._apply_gate(probe), layout.act_fn(gate) * up)


class _RowByRow:
    """A gate of a model's own, which torch must not cut at places that depend on the number of rows."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        self.gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(row) for row in split_rows(x, 1)])


class BareWeight(Tensor):
    """Stands in for a matrix that a module keeps outside any layer and gives to `F.linear`: a router's, for one.

    The product runs on a RowLinear. Any other use is refused, which the first forward, at load, shows.
    """

    linear: RowLinear

    @classmethod
    def around(cls, linear: RowLinear, compute_dtype: torch.dtype, device: torch.device) -> "BareWeight":
        element = torch.empty(1, 1, dtype=compute_dtype, device=device)
        weight = element.expand(linear.out_features, linear.in_features).as_subclass(cls)
        weight.linear = linear
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if function is F.linear and type(args[1]) is cls and not kwargs:
            product = args[1].linear(_plain(args[0]).to(args[1].dtype))
            return ExactRows.of(product if args[2:] in ((), (None,)) else product + args[2])
        if name == "__get__":  # its shape, dtype or device
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name in ("to", "type", "float") and type(args[0]) is cls:  # the product's precision is the kernel's affair
            return args[0]
        raise ModelLoadError(f"weights outside linear and embedding layers are given to {name}, not to F.linear alone")


class ExactRows(Tensor):
    """Scores of a router or a gate: so few to a row that torch's sigmoid would have rows share a vector."""

    @classmethod
    def of(cls, scores: Tensor) -> Tensor:
        return scores.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [_plain(argument) for argument in args]
        if (
            function in (torch.sigmoid, F.sigmoid, Tensor.sigmoid)
            and plain[0].dtype == torch.float32
            and plain[0].is_cpu
        ):
            return activate(plain[0], "sigmoid")
        return function(*plain, **(kwargs or {}))


class ScoreLinear(nn.Module):
    """A narrow linear layer, whose outputs are a row's scores."""

    MOST_OUTPUTS = 63  # wider outputs fill torch's vectors

    def __init__(self, linear: RowLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return ExactRows.of(self.linear(x))


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, ExactRows) else value
