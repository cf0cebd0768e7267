"""The norm that a CUDA device runs: the modelling code's, a row at a time."""

import pytest
import torch

from tests.unit.model.triton_on_a_cpu import DEVICE  # before any kernel is imported

# isort: split

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.model.cuda.rms_norm import TritonRMSNorm


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_the_norm_is_that_of_the_modelling_code(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    norm = kind(60, 1e-5).to(DEVICE)
    norm.weight.data = torch.linspace(-1, 1, 60, device=DEVICE).to(dtype)
    scale = norm.weight.float() + (1.0 if kind is GemmaRMSNorm else 0.0)
    x = torch.randn(1, 5, 3, 60, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3  # one rounding in place of two
    torch.testing.assert_close(TritonRMSNorm(scale, 1e-5)(x), norm(x), rtol=tolerance, atol=tolerance)


def test_a_rows_bits_do_not_depend_on_how_many_rows_there_are() -> None:
    norm = TritonRMSNorm(torch.ones(60, device=DEVICE), 1e-6)
    x = torch.randn(9, 60, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(norm(x[4:5]), norm(x)[4:5])
    assert torch.equal(norm(x[:, ::2].expand(9, 30).repeat(1, 2)[3:6]), norm(x[:, ::2].repeat(1, 2))[3:6])
