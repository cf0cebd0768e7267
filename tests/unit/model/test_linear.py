import pytest
import torch
from torch import nn

from specdec.errors import ModelLoadError
from specdec.model.linear import (
    FbgemmInt8Linear,
    GroupedInt4Linear,
    IndependentRowsLinear,
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


def packed(layer_class: type[RowLinear], source: nn.Linear, max_rows: int) -> RowLinear:
    return layer_class(source.weight.data, None if source.bias is None else source.bias.data, RowCounts(max_rows))


def random_rows(rows: int, features: int = 128) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer_class", "tolerance"),
    [
        (PlainLinear, 1e-6),
        (IndependentRowsLinear, 1e-6),
        (FbgemmInt8Linear, 0.06),  # 7 bits of weights and of activations, one scale for all rows
        (GroupedInt4Linear, 0.15),  # 16 levels per group of 128 inputs
    ],
)
@torch.inference_mode()
def test_each_kernel_computes_the_linear_map(layer_class: type[RowLinear], tolerance: float, bias: bool) -> None:
    source = source_layer(bias=bias)
    x = random_rows(7)
    layer = packed(layer_class, source, 64)
    for few_or_many in (x[:3], x):
        expected = source(few_or_many)
        product = layer(few_or_many[None])[0]
        assert (product - expected).norm() <= tolerance * expected.norm()


@torch.inference_mode()
def test_padding_and_splitting_change_no_bit_of_any_row() -> None:
    layer = packed(PlainLinear, source_layer(bias=True), 48)
    layer.counts.use(safe_row_counts([layer], range(1, 49), [48, 8, 1], (0, 1, 5), torch.float32, CPU))
    x = random_rows(131)
    expected = layer(x)
    for rows in (*range(1, 20), 47, 48, 49, 97, 130):
        assert torch.equal(layer(x[:rows]), expected[:rows])
        assert torch.equal(layer(x[1 : 1 + rows]), expected[1 : 1 + rows])


@torch.inference_mode()
def test_no_rows_give_no_rows() -> None:
    for layer_class in (PlainLinear, IndependentRowsLinear, FbgemmInt8Linear, GroupedInt4Linear):
        assert packed(layer_class, source_layer(bias=True), 8)(torch.empty(1, 0, 128)).shape == (1, 0, 96)


@torch.inference_mode()
def test_a_kernel_whose_bits_depend_on_the_neighbours_falls_back_to_one_row_at_a_time() -> None:
    class NeighbourDependent(PlainLinear):
        def multiply(self, x: torch.Tensor) -> torch.Tensor:
            return super().multiply(x) + x.shape[0] * x.sum()

    layer = packed(NeighbourDependent, source_layer(bias=False), 16)
    assert safe_row_counts([layer], range(1, 17), [16, 8, 1], (0, 1), torch.float32, CPU) == [1]


def test_a_weight_beyond_float16_is_refused() -> None:
    source = source_layer(bias=False)
    source.weight.data[3, 3] = 1e5
    source.half()
    with pytest.raises(ModelLoadError, match="does not fit float16"):
        packed(IndependentRowsLinear, source, 8)


def test_int4_refuses_shapes_it_has_no_groups_for() -> None:
    with pytest.raises(ModelLoadError, match="multiple of 32"):
        packed(GroupedInt4Linear, source_layer(bias=False, in_features=40), 8)


def test_quantised_kernels_are_refused_off_the_cpu() -> None:
    with pytest.raises(ModelLoadError, match="for CPUs"):
        choose_kernel(torch.device("cuda"), torch.float16, "int8")
