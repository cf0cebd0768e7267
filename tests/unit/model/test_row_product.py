import pytest
import torch

from specdec.model.row_product import PANEL, PackedWeights

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 7), (100, 50), (64, PANEL), (257, 96), (600, 2 * PANEL + 1)]  # inputs, outputs


def weights(inputs: int, outputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)).to(dtype)


def rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_weights_as_they_are_stored(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = weights(*shape, dtype), rows(13, shape[0])
    bias = torch.linspace(-1.0, 1.0, shape[1])
    product = PackedWeights(weight, bias).multiply(x)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(product.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_number_of_rows_at_any_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed, x = PackedWeights(weights(*shape, dtype), None), rows(210, shape[0])
    expected = torch.cat([packed.multiply(row[None]) for row in x])
    for count in (*range(1, 14), 95, 96, 97, 200):
        for first in (0, 1, 9):
            assert torch.equal(packed.multiply(x[first : first + count]), expected[first : first + count])


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(num_threads: int) -> None:
    packed, x = PackedWeights(weights(600, 1001, torch.float16), None), rows(5, 600)
    expected = packed.multiply(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(packed.multiply(x), expected)
    finally:
        torch.set_num_threads(threads)


def test_rows_that_do_not_lie_next_to_each_other_are_read_where_they_are() -> None:
    packed, wide = PackedWeights(weights(64, 50, torch.float16), None), rows(9, 200)
    for x in (wide[:, 30:94], wide[::2, :64], wide.T[:9, :].T[:, :9].repeat(1, 8)[:, :64]):
        assert torch.equal(packed.multiply(x), packed.multiply(x.contiguous()))
    assert packed.multiply(wide[None, :, :64]).shape == (1, 9, 50)
    assert packed.multiply(wide[:0, :64]).shape == (0, 50)


def test_a_dtype_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        PackedWeights(torch.zeros(3, 3, dtype=torch.float64), None)
