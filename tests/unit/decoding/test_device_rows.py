"""Rows of a device's logits on the host. Where there is no device, a CPU's stand for them."""

import torch

from specdec.decoding.device_rows import HostRows
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.decoding.rounds import RoundInput, TokenHistory, walk_from_device
from specdec.decoding.rows.records import NOTHING
from specdec.params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_rows_come_in_the_order_asked_for_and_one_buffer_serves_them_all() -> None:
    logits = torch.arange(40, dtype=torch.float32, device=DEVICE).view(8, 5)
    host_rows = HostRows()
    first = host_rows.take(logits, [7, 2, 2])
    assert first.is_cpu
    assert first.tolist() == logits.cpu()[[7, 2, 2]].tolist()
    second = host_rows.take(logits, [0])
    assert second.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert second.data_ptr() == first.data_ptr()
    assert host_rows.take(logits, range(8)).tolist() == logits.cpu().tolist()


def test_a_row_that_is_not_of_numbers_decides_nothing_under_greedy_either() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, float("nan"), 1.0]], device=DEVICE)
    greedy = RoundInput(SamplingParams(temperature=0.0), Noise(0), 1, DraftTokens(), TokenHistory((0,)))
    assert walk_from_device([greedy, greedy], [0, 1], logits, 3) == [([], 1), ([], NOTHING)]
