"""Swaps modules of an unmodified Hugging Face model for faster or row-exact ones, at load.

Knows which swaps keep the meaning, tried on numbers where names alone do not tell; refuses to know how the new modules
work. What they replace is freed as they are made.

Legend: M rows, H hidden, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.model.activations import RowActivation, activate
from specdec.model.experts import BareWeight, RowExperts, ScoreLinear, is_experts
from specdec.model.linear import LinearKernel, RowLinear
from specdec.model.norms import RMSNorm
from specdec.model.projections import GROUPS, computes_gated_mlp, fuse_projections, gated_mlp, looks_like_gated_mlp
from specdec.model.rotary import RotaryTable
from specdec.model.row_counts import RowCounts

_ACTIVATION_NAMES = ("act_fn", "act", "activation_fn")


class UpcastEmbedding(nn.Module):
    """An embedding that keeps its weights as they were stored and gives rows in the compute dtype, exactly."""

    def __init__(self, source: nn.Embedding, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.compute_dtype = source.weight, compute_dtype
        scale = getattr(source, "embed_scale", None)  # in the dtype of the weights, as the model would round it
        self.scale = None if scale is None else torch.as_tensor(scale).to(self.weight).to(compute_dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight).to(self.compute_dtype)
        return rows if self.scale is None else rows * self.scale


def swap_modules(model: PreTrainedModel, kernel: LinearKernel, body_counts: RowCounts, head_counts: RowCounts) -> None:
    """Replaces linears (a tied head too), experts, plain RMSNorms and, on CPUs, elementwise work and embeddings."""
    swaps = _Swaps(model, kernel, body_counts)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    _replace(model, head_name, kernel.layer(*_weights(head), head_counts))
    _cap_logits_in_the_head(model, on_cpu=swaps.on_cpu)
    del head
    for name in [name for name, _ in model.named_modules()]:
        try:
            module = model.get_submodule(name)
        except AttributeError:  # it went with its parent
            continue
        if (replacement := swaps.replacement(name.rpartition(".")[2], module)) is not None:
            _replace(model, name, replacement)
        for names in GROUPS:
            fuse_projections(module, names, swaps.make_linear)
        swaps.replace_bare_weights(module)
    for parameter in model.parameters():
        if parameter.dim() < 2:  # biases and norms; matrices live in swapped modules
            parameter.data = parameter.data.to(kernel.compute_dtype)


class _Swaps:
    """What stands in for one module, by its kind."""

    def __init__(self, model: PreTrainedModel, kernel: LinearKernel, counts: RowCounts) -> None:
        self.kernel, self.counts, self.on_cpu = kernel, counts, model.device.type == "cpu"
        self._gated_mlps: dict[tuple[Any, ...], bool] = {}

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> RowLinear:
        return self.kernel.layer(weight, bias, self.counts)

    def replacement(self, name: str, module: nn.Module) -> nn.Module | None:
        """`name` is that within its parent. None for a module that stays."""
        if type(module) is nn.Linear:
            linear = self.make_linear(*_weights(module))
            return ScoreLinear(linear) if linear.out_features <= ScoreLinear.MOST_OUTPUTS else linear
        if isinstance(module, nn.Embedding):
            return self._embedding(module)
        if is_experts(module):
            return RowExperts(module, self.make_linear, on_cpu=self.on_cpu)
        if self._is_gated_mlp(module):
            return gated_mlp(module, self.make_linear, on_cpu=self.on_cpu)
        if not self.on_cpu and (weight := _rms_norm_weight(module)) is not None:
            return _norm_of_independent_rows(weight, _epsilon(module))
        if self.kernel.compute_dtype == torch.float32 and (weight := _rms_norm_weight(module)) is not None:
            return RMSNorm(weight, _epsilon(module))
        if self.on_cpu and name in _ACTIVATION_NAMES:
            return RowActivation(module)
        if self.on_cpu and type(module).__name__.endswith("RotaryEmbedding"):
            return RotaryTable(module)
        return None

    def replace_bare_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | UpcastEmbedding | RowLinear):
            return
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                delattr(module, name)
                linear = self.make_linear(parameter.data, None)
                setattr(module, name, BareWeight.around(linear, self.kernel.compute_dtype, parameter.device))
                module.add_module(f"{name}_product", linear)

    def _embedding(self, module: nn.Embedding) -> nn.Module | None:
        """Subclasses only where what they add is known: a scale."""
        if module.weight.dtype == self.kernel.compute_dtype:
            return None
        if type(module) is not nn.Embedding and not hasattr(module, "embed_scale"):
            raise ModelLoadError(f"embeddings of {type(module).__name__} can only be run in their own dtype")
        return UpcastEmbedding(module, self.kernel.compute_dtype)

    def _is_gated_mlp(self, module: nn.Module) -> bool:
        """Tried once for all that are alike, since a model has one in each layer; some differ from layer to layer."""
        if not looks_like_gated_mlp(module):
            return False
        numbers = [(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]
        kind = (type(module), type(module.get_submodule("act_fn")), *sorted(numbers))
        if kind not in self._gated_mlps:
            self._gated_mlps[kind] = computes_gated_mlp(module)
        return self._gated_mlps[kind]


def _weights(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = linear.weight, linear.bias
    return weight.data, None if bias is None else bias.data  # type: ignore[return-value]


def _replace(model: nn.Module, name: str, replacement: nn.Module) -> None:
    parent_name, _, child_name = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child_name, replacement)


def _cap_logits_in_the_head(model: PreTrainedModel, *, on_cpu: bool) -> None:
    """Modelling code caps logits by a tanh over all of them; here the output layer does so, row by row."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None or not on_cpu:
        return
    try:
        model.config.final_logit_softcapping = None
    except Exception as error:  # a configuration that checks its fields raises what it likes
        raise ModelLoadError(f"models of type {model.config.model_type} cap their logits in any case") from error
    capped: Callable[[Tensor], Tensor] = functools.partial(_capped, float(cap))
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: capped(logits))


def _capped(cap: float, logits: Tensor) -> Tensor:
    return activate(logits.float(), "tanh", scale=cap)


def _norm_of_independent_rows(weight: Tensor, epsilon: float) -> nn.Module:
    from specdec.model.cuda.rms_norm import TritonRMSNorm

    return TritonRMSNorm(weight, epsilon)


def _epsilon(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", None)) or 0.0)


def _rms_norm_weight(module: nn.Module) -> Tensor | None:
    """w in float32 where the module computes `x / rms(x) * w`, tried on numbers: some norms scale by 1 + weight."""
    weight = getattr(module, "weight", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    probe = torch.linspace(-3.0, 2.0, weight.numel(), device=weight.device).expand(2, -1)
    expected = module(probe).float()
    for scale in (weight.data.float(), 1.0 + weight.data.float()):
        fused = F.rms_norm(probe, weight.shape, scale, _epsilon(module))
        if torch.allclose(fused, expected, rtol=1e-3, atol=1e-5):
            return scale
    return None
