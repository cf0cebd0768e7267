import pytest
import torch
import torch.nn.functional as F

from specdec.model.norms import RMSNorm


def test_the_norm_is_that_of_torch() -> None:
    for features in (1, 7, 64, 1536):
        x, weight = 3 * torch.randn(2, 5, features), torch.randn(features)
        torch.testing.assert_close(RMSNorm(weight, 1e-6)(x), F.rms_norm(x, (features,), weight, 1e-6))


def test_strided_rows_and_other_dtypes_are_normed_too() -> None:
    x, weight = torch.randn(6, 200), torch.randn(64)
    norm = RMSNorm(weight, 1e-6)
    assert torch.equal(norm(x[:, 9:73]), norm(x[:, 9:73].contiguous()))
    half = RMSNorm(weight.bfloat16(), 1e-6)
    assert half(x[:, :64].bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("features", [50, 1536])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(features: int, num_threads: int) -> None:
    norm, x = RMSNorm(torch.randn(features), 1e-6), torch.randn(50, features)
    expected = torch.cat([norm(row[None]) for row in x])
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for first, end in ((0, 2), (3, 50), (7, 14)):
            assert torch.equal(norm(x[first:end]), expected[first:end])
    finally:
        torch.set_num_threads(threads)
