"""Refuses, with a reason, models that could not be run exactly or whose state cannot be rolled back.

Knows what configurations and modules tell of themselves; what they do not tell, the runner's first forward shows.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.model.experts import is_experts

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_ROPE_OF_THE_LONGEST_SESSION = ("dynamic", "longrope")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises ModelLoadError."""
    config = model.config

    def refuse(reason: str) -> None:
        raise ModelLoadError(reason, model_type=config.model_type)

    if type(model.get_output_embeddings()) is not nn.Linear:
        refuse("a causal language model with an output layer is needed")
    if config.is_encoder_decoder:
        refuse("encoder-decoder models are not supported")
    if model._is_stateful or not getattr(config, "num_attention_heads", None):
        refuse("a model with recurrent layers has state that cannot be rolled back")
    if not getattr(config, "max_position_embeddings", None):
        refuse("the configuration does not say how many positions a session may have")
    if others := set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS:
        refuse(f"layers of type {sorted(others)[0]} are neither full nor sliding attention: they cannot be rolled back")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _ROPE_OF_THE_LONGEST_SESSION:
            refuse(f"rotary embedding of type {rope_type} depends on the longest session of a batch")
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or is_experts(module):
            continue
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if parameter.dim() > 2:
                refuse(f"weights outside linear, embedding and expert layers are not supported: {name}")


def _rope_types(parameters: dict[str, Any] | None) -> list[str]:
    """One for the model, or one for each type of its layers."""
    if not parameters:
        return []
    own = [parameters["rope_type"]] if "rope_type" in parameters else []
    return own + [
        nested["rope_type"] for nested in parameters.values() if isinstance(nested, dict) and "rope_type" in nested
    ]
