import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from specdec.model.activations import GatedActivation, RowActivation, activate, curve_of


@pytest.mark.parametrize(
    ("name", "curve"),
    [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_new", "gelu_tanh"), ("gelu", None), ("relu2", None)],
)
def test_the_curve_of_an_activation_is_found_by_its_values(name: str, curve: str | None) -> None:
    assert curve_of(ACT2FN[name]) == curve


def test_curves_are_those_of_torch() -> None:
    x = torch.linspace(-100.0, 100.0, 6001)
    for curve, expected in {
        "silu": F.silu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid(x),
        "tanh": torch.tanh(x),
    }.items():
        torch.testing.assert_close(activate(x, curve), expected, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    torch.testing.assert_close(activate(x, "tanh", scale=30.0), 30.0 * torch.tanh(x / 30.0))


def test_an_infinite_or_missing_number_stays_one() -> None:
    x = torch.tensor([float("inf"), float("nan"), 1.0])
    assert activate(x, "silu")[0] == float("inf")
    assert activate(x, "silu").isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("num_threads", [1, 3, 5])
@pytest.mark.parametrize("width", [50, 8960])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_a_row_has_the_same_bits_for_any_number_of_threads_and_rows(name: str, width: int, num_threads: int) -> None:
    activation, gated = RowActivation(ACT2FN[name]), GatedActivation(ACT2FN[name], on_cpu=True)
    x = 3 * torch.randn(24, 2 * width, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([activation(row[None]) for row in x])
    expected_gated = torch.cat([gated(row[None]) for row in x])
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for rows in (1, 2, 3, 7, 24):
            assert torch.equal(activation(x[None, :rows])[0], expected[:rows])
            assert torch.equal(gated(x[None, :rows])[0], expected_gated[:rows])
    finally:
        torch.set_num_threads(threads)


def test_a_gate_is_the_left_half() -> None:
    x = torch.randn(4, 20)
    for activation in (nn.SiLU(), nn.GELU()):
        expected = activation(x[:, :10]) * x[:, 10:]
        torch.testing.assert_close(GatedActivation(activation, on_cpu=True)(x), expected)
        torch.testing.assert_close(GatedActivation(activation, on_cpu=False)(x), expected)
