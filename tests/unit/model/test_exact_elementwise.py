"""Modelling code that calls elementwise functions itself: found at load, and run row by row from then on."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.model.exact_elementwise import ExactElementwise
from specdec.model.runner import ModelRunner, Rows
from tests.unit.model.tiny import tiny_model

NUM_ROWS = 300


@pytest.fixture(autouse=True)
def seven_threads() -> Iterator[None]:
    """So many that torch cuts wide work between rows, and within one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(threads)


def model_that_calls_silu() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=64, hidden_size=64, intermediate_size=1536, block_auto_adjust_ff_dim=False, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def test_a_model_that_calls_silu_itself_gives_a_row_the_same_bits_however_it_is_chunked() -> None:
    runner = ModelRunner.from_hf_model(model_that_calls_silu(), dtype=torch.float32, kv_budget_bytes=1 << 24)
    token_ids = [(i * 13 + 5) % 64 for i in range(NUM_ROWS)]

    def logits(chunk: int) -> Tensor:
        cache = runner.new_cache()
        parts = [
            runner.forward([Rows(cache, token_ids[first : first + chunk])])[0] for first in range(0, NUM_ROWS, chunk)
        ]
        cache.free()
        return torch.cat(parts)

    expected = logits(1)
    for chunk in (20, 130, NUM_ROWS):
        assert torch.equal(logits(chunk), expected), f"chunks of {chunk}"


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 50, 1536])
@pytest.mark.parametrize(
    "function",
    [
        F.silu, torch.sigmoid, torch.exp, torch.tanh, F.gelu, F.softplus, F.logsigmoid, torch.special.expit,
        lambda x: x.clone().sigmoid_(), lambda x: x.abs() ** 2.5, lambda x: F.silu(x.T.contiguous().T),
    ],
)  # fmt: skip
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(function: Callable[[Tensor], Tensor], width: int) -> None:
    x = 3 * torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(0))
    with ExactElementwise() as exact:
        together = function(x)
        assert torch.equal(together, torch.cat([function(row[None]) for row in x]))
    assert exact.was_needed
    torch.testing.assert_close(together, function(x))


@torch.inference_mode()
def test_what_is_exact_anyway_needs_nothing() -> None:
    x = torch.randn(8, 64)
    with ExactElementwise() as exact:
        x.softmax(dim=-1) + x.square() * x.pow(3) / x.abs().sqrt() + torch.rsqrt(x.abs()).relu()
        torch.exp(torch.tensor(2.0))  # a constant
    assert not exact.was_needed


@torch.inference_mode()
@pytest.mark.parametrize(
    "function", [lambda x: torch.logaddexp(x, x), lambda x: 2.0**x, lambda x: x**x, lambda x: x.softmax(dim=0)]
)
def test_what_cannot_be_run_row_by_row_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with ExactElementwise(), pytest.raises(ModelLoadError, match="a row's bits depend on other rows"):
        function(torch.randn(8, 64))


def test_our_own_modules_are_not_watched() -> None:
    runner = ModelRunner.from_hf_model(tiny_model(), dtype=torch.float32, kv_budget_bytes=1 << 24)
    assert not runner._elementwise.was_needed  # every forward would pay for it
