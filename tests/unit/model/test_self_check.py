import pytest
import torch

from specdec.model.linear import IndependentRowsLinear
from specdec.model.runner import ModelRunner, Rows
from specdec.model.self_check import run_self_check
from tests.unit.model.tiny import tiny_model


def make_runner(dtype: torch.dtype = torch.float16) -> ModelRunner:
    return ModelRunner.from_hf_model(tiny_model("qwen2"), dtype=dtype)


def test_the_check_finds_the_row_counts_and_proves_them() -> None:
    runner = make_runner()
    check = run_self_check(runner)
    assert check.passed, check.detail
    assert check.max_rows == runner.body_counts.largest
    assert check.safe_row_counts == runner.body_counts.counts
    assert runner.head_counts.largest <= runner.kernel.max_rows
    assert check.num_comparisons >= 20


def test_a_kernel_that_is_row_exact_for_no_block_is_still_made_exact() -> None:
    runner = make_runner(torch.float32)
    check = run_self_check(runner)
    assert check.passed, check.detail


def test_a_device_that_breaks_the_promise_is_told_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    multiply = IndependentRowsLinear.multiply
    calls = 0

    def unsteady(self: IndependentRowsLinear, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return multiply(self, x) * (1 + 1e-6 * (calls % 7))

    monkeypatch.setattr(IndependentRowsLinear, "multiply", unsteady)
    check = run_self_check(runner)
    assert not check.passed
    assert "rows differ" in check.detail
    assert runner.forward([Rows(runner.new_cache(), [1, 2, 3])])[0].shape == (3, 320)


def test_an_error_in_the_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()

    def broken(self: IndependentRowsLinear, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(IndependentRowsLinear, "multiply", broken)
    check = run_self_check(runner)
    assert not check.passed
    assert "no such instruction" in check.detail


def test_a_context_shorter_than_the_probe_is_checked_too() -> None:
    runner = ModelRunner.from_hf_model(tiny_model(context_limit=16), dtype=torch.float16)
    check = run_self_check(runner)
    assert check.passed, check.detail
