import pytest
import torch
from torch import nn

from specdec.errors import ModelLoadError
from specdec.model.linear import (
    FbgemmFloat16Linear,
    FbgemmInt8Linear,
    GroupedInt4Linear,
    PlainLinear,
    RowLinear,
    choose_kernel,
)
from specdec.model.row_counts import RowCounts
from specdec.model.self_check import safe_row_counts

CPU = torch.device("cpu")


def source_layer(*, bias: bool, in_features: int = 128, out_features: int = 96) -> nn.Linear:
    generator = torch.Generator().manual_seed(5)
    layer = nn.Linear(in_features, out_features, bias=bias)
    layer.weight.data = torch.randn(out_features, in_features, generator=generator).half().float()
    if bias:
        layer.bias.data = torch.randn(out_features, generator=generator)
    return layer


def random_rows(rows: int, features: int = 128) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer_class", "tolerance"),
    [
        (PlainLinear, 1e-6),
        (FbgemmFloat16Linear, 1e-5),  # the weights are float16 already; only sums are ordered differently
        (FbgemmInt8Linear, 0.06),  # 7 bits of weights and of activations, one scale for all rows
        (GroupedInt4Linear, 0.15),  # 16 levels per group of 128 inputs
    ],
)
@torch.inference_mode()
def test_each_kernel_computes_the_linear_map(layer_class: type[RowLinear], tolerance: float, bias: bool) -> None:
    source = source_layer(bias=bias)
    x = random_rows(7)
    layer = layer_class(source, RowCounts(64))
    for few_or_many in (x[:3], x):
        expected = source(few_or_many)
        product = layer(few_or_many[None])[0]
        assert (product - expected).norm() <= tolerance * expected.norm()


@torch.inference_mode()
def test_padding_and_splitting_change_no_bit_of_any_row() -> None:
    source = source_layer(bias=True)
    exact = FbgemmFloat16Linear(source, RowCounts(48))
    exact.counts.use(safe_row_counts([exact], range(1, 49), [48], (0, 1, 5), torch.float32, CPU))
    x = random_rows(131)
    expected = exact(x)
    for rows in (*range(1, 20), 47, 48, 49, 97, 130):
        assert torch.equal(exact(x[:rows]), expected[:rows])
        assert torch.equal(exact(x[1 : 1 + rows]), expected[1 : 1 + rows])


@torch.inference_mode()
def test_no_rows_give_no_rows() -> None:
    for layer_class in (PlainLinear, FbgemmFloat16Linear, FbgemmInt8Linear, GroupedInt4Linear):
        assert layer_class(source_layer(bias=True), RowCounts(8))(torch.empty(1, 0, 128)).shape == (1, 0, 96)


@torch.inference_mode()
def test_a_kernel_whose_bits_depend_on_the_neighbours_falls_back_to_one_row_at_a_time() -> None:
    class NeighbourDependent(PlainLinear):
        def multiply(self, x: torch.Tensor) -> torch.Tensor:
            return super().multiply(x) + x.shape[0] * x.sum()

    layer = NeighbourDependent(source_layer(bias=False), RowCounts(16))
    assert safe_row_counts([layer], range(1, 17), [16, 8, 1], (0, 1), torch.float32, CPU) == [1]


def test_a_weight_beyond_float16_is_refused() -> None:
    source = source_layer(bias=False)
    source.weight.data[3, 3] = 1e5
    with pytest.raises(ModelLoadError, match="does not fit float16"):
        FbgemmFloat16Linear(source, RowCounts(8))


def test_int4_refuses_shapes_it_has_no_groups_for() -> None:
    with pytest.raises(ModelLoadError, match="multiple of 32"):
        GroupedInt4Linear(source_layer(bias=False, in_features=40), RowCounts(8))


def test_quantised_kernels_are_refused_off_the_cpu() -> None:
    with pytest.raises(ModelLoadError, match="for CPUs"):
        choose_kernel(torch.device("cuda"), torch.float16, "int8")
