import pytest
import torch
from torch import Tensor, nn

from specdec.model.linear import IndependentRowsLinear, RowLinear
from specdec.model.projections import ProjectionSlice, fuse_projections
from specdec.model.row_counts import RowCounts

NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    def __init__(self, sizes: tuple[int, int, int] = (32, 16, 16), inputs: tuple[int, int, int] = (24, 24, 24)) -> None:
        super().__init__()
        for name, size, width, bias in zip(NAMES, sizes, inputs, (True, True, False), strict=True):
            setattr(self, name, nn.Linear(width, size, bias=bias))


class Counting(IndependentRowsLinear):
    calls = 0

    def multiply(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().multiply(x)


def make_linear(weight: Tensor, bias: Tensor | None) -> RowLinear:
    return Counting(weight, bias, RowCounts(16))


@pytest.fixture
def modules() -> tuple[list[nn.Module], list[nn.Module]]:
    """The projections as they were, and fused."""
    attention = Attention()
    plain = [getattr(attention, name) for name in NAMES]
    assert fuse_projections(attention, NAMES, make_linear)
    Counting.calls = 0
    return plain, [getattr(attention, name) for name in NAMES]


@torch.inference_mode()
def test_one_product_serves_all_projections_of_an_input(modules: tuple[list[nn.Module], list[nn.Module]]) -> None:
    plain, fused = modules
    for _ in range(3):
        x = torch.randn(1, 5, 24)
        for before, after in zip(plain, fused, strict=True):
            torch.testing.assert_close(after(x), before(x))
    assert Counting.calls == 3


@torch.inference_mode()
def test_any_order_and_any_other_input_is_answered_right(modules: tuple[list[nn.Module], list[nn.Module]]) -> None:
    plain, fused = modules
    x, y = torch.randn(5, 24), torch.randn(5, 24)
    for index, given in ((2, x), (0, x), (1, y), (1, x), (2, y), (2, y), (0, y)):
        torch.testing.assert_close(fused[index](given), plain[index](given))


@torch.inference_mode()
def test_a_tensor_that_was_written_to_is_multiplied_anew(modules: tuple[list[nn.Module], list[nn.Module]]) -> None:
    plain, fused = modules
    x = torch.randn(5, 24)
    for _ in range(2):
        for before, after in zip(plain, fused, strict=True):
            torch.testing.assert_close(after(x), before(x))
        x += 1.0


@torch.inference_mode()
def test_nothing_is_kept_once_all_have_been_served(modules: tuple[list[nn.Module], list[nn.Module]]) -> None:
    fused = modules[1]
    x = torch.randn(5, 24)
    for module in fused:
        module(x)
    assert isinstance(fused[0], ProjectionSlice)
    assert fused[0].shared._product is None
    assert fused[0].shared._input is None


def test_projections_that_do_not_belong_together_stay_single() -> None:
    other_inputs = Attention(inputs=(24, 24, 20))
    assert not fuse_projections(other_inputs, NAMES, make_linear)
    other_dtype = Attention()
    other_dtype.v_proj.half()  # type: ignore[operator]
    assert not fuse_projections(other_dtype, NAMES, make_linear)
    assert not fuse_projections(Attention(), ("q_proj", "gate_proj"), make_linear)
    assert type(other_inputs.q_proj) is nn.Linear
