import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from specdec.errors import ModelLoadError
from specdec.model.experts import BareWeight, ExactRows, RowExperts, is_experts
from specdec.model.linear import IndependentRowsLinear, RowLinear
from specdec.model.row_counts import RowCounts
from tests.unit.model.tiny import tiny_model


def make_linear(weight: Tensor, bias: Tensor | None) -> RowLinear:
    return IndependentRowsLinear(weight, bias, RowCounts(64))


def mixtral_experts() -> Any:
    return tiny_model("mixtral", layers=1).model.layers[0].mlp.experts


def gpt_oss_experts() -> Any:
    """Transposed and interleaved weights, biases, and a gate of its own."""
    experts = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=48, num_local_experts=4))
    for parameter in experts.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.dim()))
    return experts


def routing(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_rows, 64, generator=generator)
    weights, index = torch.rand(num_rows, 4, generator=generator).softmax(dim=1).topk(2, dim=1)
    return x, index, weights


@pytest.mark.parametrize("make", [mixtral_experts, gpt_oss_experts])
@torch.inference_mode()
def test_swapped_experts_compute_what_the_models_own_do(make: Any) -> None:
    source = make()
    source.config._experts_implementation = "eager"
    assert is_experts(source)
    expected = source(*routing(21))
    experts = RowExperts(copy.deepcopy(source), make_linear, on_cpu=True)
    torch.testing.assert_close(experts(*routing(21)), expected, rtol=1e-4, atol=1e-4)
    assert all(parameter.dim() < 3 for parameter in experts.parameters())  # the weights are kept once


@pytest.mark.parametrize("make", [mixtral_experts, gpt_oss_experts])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whoever_shares_its_experts(make: Any) -> None:
    experts = RowExperts(make(), make_linear, on_cpu=True)
    x, index, weights = routing(40)
    expected = experts(x, index, weights)
    for first, end in ((0, 1), (3, 5), (11, 40), (7, 16)):
        rows = slice(first, end)
        assert torch.equal(experts(x[rows], index[rows], weights[rows]), expected[rows])


def test_experts_with_weights_beyond_the_known_ones_are_refused() -> None:
    source = mixtral_experts()
    source.scale = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ModelLoadError, match=MixtralExperts.__name__):
        RowExperts(source, make_linear, on_cpu=True)


@torch.inference_mode()
def test_a_routers_matrix_is_multiplied_row_by_row_and_used_for_nothing_else() -> None:
    matrix, x = torch.randn(6, 64), torch.randn(9, 64)
    weight = BareWeight.around(make_linear(matrix, None), torch.float32, torch.device("cpu"))
    scores = F.linear(x, weight)
    torch.testing.assert_close(scores.as_subclass(Tensor), x @ matrix.T)
    biased = F.linear(x, weight, torch.arange(6.0))
    assert torch.equal(biased.as_subclass(Tensor), scores.as_subclass(Tensor) + torch.arange(6.0))
    assert weight.shape == (6, 64)
    assert weight.dtype == torch.float32
    assert torch.equal(
        F.linear(x, weight.float())[2:3].as_subclass(Tensor), F.linear(x[2:3], weight).as_subclass(Tensor)
    )
    with pytest.raises(ModelLoadError, match="given to matmul"):
        torch.matmul(weight, x)


@torch.inference_mode()
def test_the_sigmoid_of_a_rows_scores_does_not_depend_on_its_neighbours() -> None:
    scores = 3 * torch.randn(100, 1)
    together = torch.sigmoid(ExactRows.of(scores))
    alone = torch.cat([ExactRows.of(row).sigmoid() for row in scores.split(1)])
    assert type(together) is Tensor
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, torch.sigmoid(scores))
