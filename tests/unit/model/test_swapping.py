import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from specdec.errors import ModelLoadError
from specdec.model.linear import RowLinear, choose_kernel
from specdec.model.row_counts import RowCounts
from specdec.model.swapping import FusedRMSNorm, RowBlockActivation, UpcastEmbedding, refuse_unsupported, swap_modules
from tests.unit.model.tiny import tiny_model


def test_every_linear_is_swapped_and_a_tied_output_layer_too() -> None:
    model = tiny_model(tie_word_embeddings=True).half()
    body, head = RowCounts(8), RowCounts(8)
    swap_modules(model, choose_kernel(torch.device("cpu"), torch.float16), body, head)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.lm_head, RowLinear)
    assert model.lm_head.counts is head
    assert isinstance(model.model.embed_tokens, UpcastEmbedding)
    assert isinstance(model.model.norm, FusedRMSNorm)
    assert sum(module.counts is body for module in model.modules() if isinstance(module, RowLinear)) == 2 * 7


def test_a_norm_that_scales_by_one_plus_weight_is_left_alone() -> None:
    config = GemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = GemmaForCausalLM(config).eval()
    for parameter in model.model.norm.parameters():
        parameter.data += 0.5
    swap_modules(model, choose_kernel(torch.device("cpu"), torch.float32), RowCounts(8), RowCounts(8))
    assert not isinstance(model.model.norm, FusedRMSNorm)


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_an_activation_gives_a_row_the_same_bits_for_any_number_of_threads_and_rows(num_threads: int) -> None:
    activation = RowBlockActivation(nn.SiLU())
    x = 3 * torch.randn(48, 8960, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([nn.functional.silu(row[None]) for row in x])
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(activation(x[None, :rows])[0], expected[:rows]) for rows in range(1, 49))
    finally:
        torch.set_num_threads(threads)


def test_models_with_weights_we_would_not_run_exactly_are_refused_by_name() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        sliding_window=None,
    )
    mixture = MixtralForCausalLM(config)
    with pytest.raises(ModelLoadError, match="outside linear"):
        refuse_unsupported(mixture)
    with pytest.raises(ModelLoadError, match="outside linear"):
        refuse_unsupported(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)))


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="output layer"):
        refuse_unsupported(LlamaModel(tiny_model().config))
