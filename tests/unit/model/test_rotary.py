import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from specdec.model.rotary import RotaryTable
from tests.unit.model.tiny import tiny_model


@torch.inference_mode()
def test_tables_hold_what_the_models_own_module_computes() -> None:
    source = tiny_model().model.rotary_emb
    table, x = RotaryTable(source), torch.zeros(1, 3, 64)
    for positions in ([[5, 0, 3]], [[130, 131, 400]], [[1, 200, 0]]):
        for found, expected in zip(table(x, torch.tensor(positions)), source(x, torch.tensor(positions)), strict=True):
            torch.testing.assert_close(found, expected)


@torch.inference_mode()
def test_each_kind_of_layer_has_a_table_of_its_own() -> None:
    source = Gemma3RotaryEmbedding(tiny_model("gemma3", layers=6).config)
    table, x, positions = RotaryTable(source), torch.zeros(1, 2, 64), torch.tensor([[9, 40]])
    for layer_type in ("sliding_attention", "full_attention", "sliding_attention"):
        torch.testing.assert_close(table(x, positions, layer_type)[0], source(x, positions, layer_type)[0])


@pytest.mark.parametrize("num_threads", [3, 5])
@torch.inference_mode()
def test_a_position_has_the_same_bits_for_any_number_of_rows_and_threads(num_threads: int) -> None:
    source, x = tiny_model(hidden_size=512, context_limit=2048).model.rotary_emb, torch.zeros(1, 1, 512)
    expected = RotaryTable(source)(x, torch.arange(700)[None])[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        table = RotaryTable(source)
        for first, end in ((0, 3), (3, 640), (640, 700)):
            assert torch.equal(table(x, torch.arange(first, end)[None])[0], expected[:, first:end])
    finally:
        torch.set_num_threads(threads)
