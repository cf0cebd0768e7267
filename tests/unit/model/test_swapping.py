import dataclasses
import weakref

import pytest
import torch
from torch import nn
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from specdec.errors import ModelLoadError
from specdec.model.activations import RowActivation
from specdec.model.linear import RowLinear, choose_kernel
from specdec.model.norms import RMSNorm
from specdec.model.projections import GatedMLP, ProjectionSlice
from specdec.model.rotary import RotaryTable
from specdec.model.row_counts import RowCounts
from specdec.model.swapping import UpcastEmbedding, swap_modules
from tests.unit.model.tiny import tiny_model

CPU = torch.device("cpu")


def test_every_linear_is_swapped_and_a_tied_output_layer_too() -> None:
    model = tiny_model(tie_word_embeddings=True).half()
    body, head = RowCounts(8), RowCounts(8)
    swap_modules(model, choose_kernel(CPU, torch.float16), body, head)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.lm_head, RowLinear)
    assert model.lm_head.counts is head
    assert isinstance(model.model.embed_tokens, UpcastEmbedding)
    assert isinstance(model.model.norm, RMSNorm)
    assert isinstance(model.model.rotary_emb, RotaryTable)
    layer = model.model.layers[1]
    assert isinstance(layer.mlp, GatedMLP)
    assert isinstance(layer.self_attn.k_proj, ProjectionSlice)
    assert isinstance(layer.self_attn.o_proj, RowLinear)
    # Queries, keys and values; their output; gate and up; down.
    assert sum(module.counts is body for module in model.modules() if isinstance(module, RowLinear)) == 2 * 4


def test_a_norm_that_scales_by_one_plus_weight_is_found_out() -> None:
    model = tiny_model("gemma2")
    norm = model.model.norm
    x = torch.randn(3, 64)
    expected = norm(x)
    swap_modules(model, choose_kernel(CPU, torch.float32), RowCounts(8), RowCounts(8))
    assert isinstance(model.model.norm, RMSNorm)
    torch.testing.assert_close(model.model.norm(x), expected)


def test_a_norm_that_is_neither_is_left_alone() -> None:
    model = tiny_model()
    model.model.norm.forward = lambda x: 2 * x
    swap_modules(model, choose_kernel(CPU, torch.float32), RowCounts(8), RowCounts(8))
    assert not isinstance(model.model.norm, RMSNorm)


def test_a_multilayer_perceptron_that_only_looks_gated_keeps_its_own_code() -> None:
    model = tiny_model(layers=1)
    mlp = model.model.layers[0].mlp
    kind = type("SparseMLP", (type(mlp),), {"forward": lambda self, x: self.down_proj(self.up_proj(x))})
    mlp.__class__ = kind
    swap_modules(model, choose_kernel(CPU, torch.float32), RowCounts(8), RowCounts(8))
    assert type(model.model.layers[0].mlp) is kind
    assert isinstance(mlp.up_proj, ProjectionSlice)
    assert isinstance(mlp.act_fn, RowActivation)


def test_perceptrons_of_one_class_that_differ_from_layer_to_layer_are_each_tried() -> None:
    config = Gemma3nTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, activation_sparsity_pattern=[0.0, 0.9]
    )  # fmt: skip
    model = tiny_model(hidden_size=32, kv_heads=4)
    for index, layer in enumerate(model.model.layers):
        layer.mlp = Gemma3nTextMLP(config, index)
    swap_modules(model, choose_kernel(CPU, torch.float32), RowCounts(8), RowCounts(8))
    assert isinstance(model.model.layers[0].mlp, GatedMLP)
    assert isinstance(model.model.layers[1].mlp, Gemma3nTextMLP)


def test_weights_are_freed_as_they_are_packed() -> None:
    model = tiny_model(layers=2)
    alive: list[int] = []
    linears = [model.model.layers[0].self_attn.q_proj, model.model.layers[0].mlp.down_proj]
    storages = [weakref.ref(linear) for linear in linears]
    del linears
    kernel = choose_kernel(CPU, torch.float32)

    class Watching(kernel.layer):  # type: ignore[name-defined, misc]
        def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            alive.append(sum(reference() is not None for reference in storages))
            super().pack(weight, bias)

    swap_modules(model, dataclasses.replace(kernel, layer=Watching), RowCounts(8), RowCounts(8))
    assert alive[0] == 2
    assert alive[-1] == 0  # layer 1 is packed when layer 0 is gone


def test_an_embedding_whose_extra_work_is_unknown_is_refused_in_another_dtype() -> None:
    model = tiny_model().half()
    model.model.embed_tokens.__class__ = type("Rotated", (nn.Embedding,), {})
    with pytest.raises(ModelLoadError, match="Rotated"):
        swap_modules(model, choose_kernel(CPU, torch.float16), RowCounts(8), RowCounts(8))
