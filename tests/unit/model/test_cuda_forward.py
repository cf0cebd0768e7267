"""Recorded forwards on buffers at fixed addresses. On a CPU a stand-in records by remembering the function."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.model.cuda.graphs import Forward, GraphedForwards
from specdec.model.cuda.step_inputs import StepInputs

CPU = torch.device("cpu")


class RememberingRecorder:
    """Overwrites one output at each repetition, as a graph does."""

    def __init__(self, largest_rows: int = 1024) -> None:
        self.largest_rows, self.num_replays = largest_rows, 0

    def record(self, forward: Forward) -> Forward:
        output = forward()
        if len(output) > self.largest_rows:
            raise RuntimeError("out of memory while recording")

        def replay() -> Tensor:
            self.num_replays += 1
            return output.copy_(forward())

        return replay


def arrays(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    names = ("token_ids", "positions", "wanted_rows", "write_slots", "num_keys", "num_direct_keys", "table_starts")
    return {name: generator.integers(0, 1000, num_rows) for name in names} | {"ancestor_starts": np.zeros(0, np.int64)}


def test_views_lie_at_the_same_addresses_whatever_is_filled_in() -> None:
    inputs = StepInputs(64, 100, CPU)
    views = inputs.views(32)
    for seed in range(3):
        given = arrays(20, seed)
        filled = inputs.fill(32, given, np.arange(90, dtype=np.int32))
        assert filled.token_ids.data_ptr() == views.token_ids.data_ptr()
        assert views.token_ids[:20].tolist() == given["token_ids"].tolist()
        assert views.write_slots.tolist() == [*given["write_slots"], *[-1] * 12]
        assert views.num_keys[20:].tolist() == views.ancestor_starts.tolist()[20:] == [0] * 12
        assert views.indices[:90].tolist() == list(range(90))


def test_what_does_not_fit_the_buffers_is_refused() -> None:
    inputs = StepInputs(16, 10, CPU)
    with pytest.raises(ValueError, match="do not fit"):
        inputs.fill(17, arrays(17, 0), np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match="do not fit"):
        inputs.fill(16, arrays(16, 0), np.zeros(11, dtype=np.int32))


def test_a_recorded_shape_is_replayed_and_another_runs_as_it_is() -> None:
    recorder = RememberingRecorder()
    forwards = GraphedForwards(lambda rows, wanted: torch.full((wanted, 2), float(rows)), recorder)
    forwards.record({(16, 16), (32, 16)})
    assert forwards.run(32, 16).tolist() == [[32.0, 32.0]] * 16
    assert recorder.num_replays == 1
    assert forwards.run(32, 32).shape == (32, 2)
    assert recorder.num_replays == 1
    assert forwards.shapes == ((16, 16), (32, 16))


def test_where_recording_fails_forwards_run_as_they_are_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    forwards = GraphedForwards(lambda rows, wanted: torch.zeros(wanted, 2), RememberingRecorder(largest_rows=16))
    forwards.record({(64, 64), (32, 32)})
    assert forwards.shapes == ()
    assert "64 rows and fewer are not recorded as graphs: out of memory while recording" in caplog.text
    assert forwards.run(64, 64).shape == (64, 2)
