"""Swaps modules of an unmodified Hugging Face model for faster or row-exact ones, at load.

Knows which swaps keep the meaning; refuses models whose weights or state the runner could not handle exactly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.model.linear import LinearKernel
from specdec.model.row_counts import RowCounts, split_rows

_ACTIVATION_NAMES = ("act_fn", "act", "activation_fn")
_ONE_THREAD_ELEMENTS = 32767  # torch splits larger elementwise work between threads


class UpcastEmbedding(nn.Module):
    """An embedding that keeps its weights as they were stored and gives rows in the compute dtype, exactly."""

    def __init__(self, source: nn.Embedding, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.compute_dtype = source.weight, compute_dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight).to(self.compute_dtype)


class FusedRMSNorm(nn.Module):
    """One call in place of six. See `_is_plain_rms_norm` for where it stands in."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon, self.shape = weight, epsilon, tuple(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.epsilon)


class RowBlockActivation(nn.Module):
    """An activation that never runs over more rows than one thread takes.

    Between threads torch cuts elementwise work anywhere, and the few elements at a cut go through scalar code whose
    exponential differs in the last bit: with 3, 5 or 6 threads a row's SiLU would depend on the number of rows.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= _ONE_THREAD_ELEMENTS:
            return self.inner(x)  # type: ignore[no-any-return]
        rows = x.reshape(-1, x.shape[-1])
        block_rows = max(1, _ONE_THREAD_ELEMENTS // x.shape[-1])
        return torch.cat([self.inner(block) for block in split_rows(rows, block_rows)]).view(x.shape)


def swap_modules(model: PreTrainedModel, kernel: LinearKernel, body_counts: RowCounts, head_counts: RowCounts) -> None:
    """Replaces linears (a tied head too), plain RMSNorms and, on CPUs, activations and low-precision embeddings."""
    on_cpu = model.device.type == "cpu"
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        replacement: nn.Module | None = None
        if type(module) is nn.Linear:
            replacement = kernel.layer(module, head_counts if module is head else body_counts)
        elif type(module) is nn.Embedding and module.weight.dtype != kernel.compute_dtype:
            replacement = UpcastEmbedding(module, kernel.compute_dtype)
        elif kernel.compute_dtype == torch.float32 and _is_plain_rms_norm(module):
            replacement = FusedRMSNorm(nn.Parameter(module.weight.data.float(), requires_grad=False), _epsilon(module))
        elif on_cpu and name.rpartition(".")[2] in _ACTIVATION_NAMES:
            replacement = RowBlockActivation(module)
        if replacement is not None:
            parent_name, _, child_name = name.rpartition(".")
            setattr(model.get_submodule(parent_name), child_name, replacement)
    for parameter in model.parameters():
        if parameter.dim() < 2:  # biases and norms; matrices live in swapped modules
            parameter.data = parameter.data.to(kernel.compute_dtype)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises ModelLoadError for a model that could not be run exactly, or whose state cannot be rolled back."""
    config = model.config
    if model.get_output_embeddings() is None:
        raise ModelLoadError("a causal language model with an output layer is needed", model_type=config.model_type)
    if config.is_encoder_decoder:
        raise ModelLoadError("encoder-decoder models are not supported", model_type=config.model_type)
    layer_types = set(getattr(config, "layer_types", None) or ("full_attention",))
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if has_window or "sliding_attention" in layer_types:
        raise ModelLoadError("models with sliding-window attention are not supported", model_type=config.model_type)
    if layer_types != {"full_attention"}:
        raise ModelLoadError(
            "a model with layers other than full attention has state that cannot be rolled back",
            model_type=config.model_type,
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ModelLoadError(
            f"rotary embedding of type {rope_type} depends on the longest session of a batch",
            model_type=config.model_type,
        )
    in_known_modules = {
        id(parameter)
        for module in model.modules()
        if type(module) in (nn.Linear, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in in_known_modules:
            raise ModelLoadError(
                f"weights outside linear and embedding layers are not supported: {name}", model_type=config.model_type
            )


def _epsilon(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", None)) or 0.0)


def _is_plain_rms_norm(module: nn.Module) -> bool:
    """True where the module computes `x / rms(x) * weight`, tried on numbers: some norms scale by 1 + weight."""
    weight = getattr(module, "weight", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return False
    probe = torch.linspace(-3.0, 2.0, weight.numel(), device=weight.device).expand(2, -1)
    expected = module(probe).float()
    fused = F.rms_norm(probe, weight.shape, weight.float(), _epsilon(module))
    return torch.allclose(fused, expected, rtol=1e-3, atol=1e-5)
