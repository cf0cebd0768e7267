"""The whole path of a CUDA device around a tiny model: packed inputs, recorded forwards, Triton's attention.

On a CPU kernels are interpreted and recordings remembered; on a CUDA device everything is real.
"""

import pytest
import torch

from tests.unit.model.triton_on_a_cpu import DEVICE  # before any kernel is imported

# isort: split

from specdec.model.cuda.forward import CudaForward
from specdec.model.cuda.paged_attention import CudaPagedAttention
from specdec.model.runner import ModelRunner, Rows
from tests.unit.model.test_cuda_forward import RememberingRecorder
from tests.unit.model.tiny import tiny_model

SIZES = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "context_limit": 128, "vocabulary_size": 300}


def make_runner(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, CudaForward]:
    runner = ModelRunner.from_hf_model(tiny_model("qwen2", **SIZES).to(DEVICE), dtype=torch.float32)  # type: ignore[arg-type]
    if DEVICE.type == "cpu":
        attention = CudaPagedAttention(runner.storage, max_rows=32)
        monkeypatch.setattr(runner, "_attention", attention)
        monkeypatch.setattr(runner, "cuda_forward", CudaForward(runner._run_model, attention, RememberingRecorder()))
    forward = runner.cuda_forward
    assert forward is not None
    runner.use_row_counts([8, 16])
    return runner, forward


def test_a_session_is_right_and_exact_through_recorded_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, forward = make_runner(monkeypatch)
    assert runner.max_rows == 16
    assert forward.recorded_shapes == ((8, 8), (16, 8), (16, 16))
    token_ids = [(7 * i) % 300 for i in range(14)]
    plain = tiny_model("qwen2", **SIZES).to(DEVICE)  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = plain(torch.tensor([token_ids], device=DEVICE)).logits[0]

    cache, other = runner.new_cache(), runner.new_cache()
    whole = runner.forward([Rows(cache, token_ids)])[0]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-3)  # logits reach 30

    cache.rollback(9)
    assert torch.equal(runner.forward([Rows(cache, token_ids[9:10])])[0], whole[9:10])
    _, beside = runner.forward([Rows(other, token_ids[:5]), Rows(cache, token_ids[10:14], logits_from=2)])
    assert torch.equal(beside, whole[12:14])
    cache.rollback(9)
    tree = [token_ids[9], 299, token_ids[10], token_ids[11], 298]
    outputs = runner.forward([Rows(cache, tree, parent_rows=(-1, 0, 0, 2, 2))])[0]
    assert torch.equal(outputs[[0, 2, 3]], whole[9:12])
    cache.compact(9, [0, 2, 3])
    assert torch.equal(runner.forward([Rows(cache, token_ids[12:])])[0], whole[12:])
    assert runner.forward([Rows(other, token_ids[5:7], logits_from=2)])[0].shape == (0, 300)


def test_logits_are_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make_runner(monkeypatch)
    first, second = runner.new_cache(), runner.new_cache()
    logits = runner.forward([Rows(first, [1, 2, 3])])[0]
    kept = logits.clone()
    runner.forward([Rows(second, [4, 5, 6])])
    assert torch.equal(logits, kept)
