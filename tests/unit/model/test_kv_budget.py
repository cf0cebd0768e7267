from pathlib import Path

import pytest
import torch

from specdec.errors import ModelLoadError
from specdec.model import kv_budget
from specdec.model.kv_budget import available_memory_bytes, default_kv_budget_bytes
from specdec.model.runner import ModelRunner
from tests.unit.model.paged import LAYOUT
from tests.unit.model.tiny import tiny_model

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 GiB free, and no limit of a container's."""
    monkeypatch.setattr(kv_budget, "_CGROUP", tmp_path)
    monkeypatch.setattr(kv_budget, "_MEMORY_INFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path


def test_free_memory_is_the_machines_where_no_container_limits_it(machine: Path) -> None:
    assert available_memory_bytes() == 8 * GIB
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("1234\n")
    assert available_memory_bytes() == 8 * GIB


def test_a_container_has_what_its_limit_leaves(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{3 * GIB}\n")
    (machine / "memory.current").write_text(f"{GIB}\n")
    assert available_memory_bytes() == 2 * GIB


def test_the_budget_is_a_quarter_of_the_free_memory_and_at_most_64_sessions(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_kv_budget_bytes(LAYOUT) == 64 * 700 * LAYOUT.bytes_per_token
    (machine / "meminfo").write_text("MemAvailable: 4096 kB\n")
    assert default_kv_budget_bytes(LAYOUT) == 1024 * 1024


def test_a_runner_keeps_to_its_budget() -> None:
    runner = ModelRunner.from_hf_model(tiny_model(), dtype=torch.float32, kv_budget_bytes=1_000_000)
    assert runner.kv_budget_bytes == 1_000_000
    stored = sum(layer.nbytes for layer in (*runner.storage.keys, *runner.storage.values))
    assert stored == runner.pool.num_blocks * 16 * runner.kv_bytes_per_token
    assert 1_000_000 - 16 * runner.kv_bytes_per_token < stored <= 1_000_000


def test_a_budget_too_small_to_work_with_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="holds 0 positions"):
        ModelRunner.from_hf_model(tiny_model(), dtype=torch.float32, kv_budget_bytes=1000)
