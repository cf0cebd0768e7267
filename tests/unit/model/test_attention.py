"""What the attention function takes from transformers, and what it refuses."""

import pytest
import torch
from torch import nn

from specdec.errors import ModelLoadError
from specdec.model.attention import AttentionBatch, OutputBuffer, attend
from specdec.model.attention_plan import AttentionOptions, SessionRows, plan_attention
from specdec.model.block_pool import BlockPool
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.paged_attention import paged_attention

LAYOUT = CacheLayout(1, 2, 8, torch.float32, torch.device("cpu"), 64)


class Layer(nn.Module):
    layer_idx = 0


def make_batch(num_rows: int) -> AttentionBatch:
    storage = KVStorage(LAYOUT, 4)
    cache = KVCache(BlockPool(4), storage)
    cache.reserve(num_rows)
    plan = plan_attention([SessionRows(cache, num_rows)], num_rows)
    return AttentionBatch(paged_attention(storage, 64), plan, OutputBuffer(LAYOUT))


def states(heads: int, num_rows: int = 5, head_size: int = 8) -> torch.Tensor:
    return torch.randn(1, heads, num_rows, head_size, generator=torch.Generator().manual_seed(heads))


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def test_rows_come_back_with_their_heads_in_order() -> None:
    query, key, value = states(4), states(2), states(2)
    output, weights = attend(Layer(), query, key, value, None, specdec_batch=make_batch(5))
    assert weights is None
    torch.testing.assert_close(output, expected(query, key, value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_of_any_strides_and_of_another_dtype_are_taken(strided: bool) -> None:
    query, key, value = (tensor.half() for tensor in (states(4), states(2), states(2)))
    reference = expected(query.float(), key.float(), value.float())
    if strided:  # the last dimension apart too
        query, key, value = (tensor.mT.contiguous().mT for tensor in (query, key, value))
    output, _ = attend(Layer(), query, key, value, None, specdec_batch=make_batch(5))
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.float(), reference, rtol=1e-3, atol=1e-3)


def test_a_batch_notes_the_layers_that_ran_and_their_windows() -> None:
    batch = make_batch(5)
    attend(Layer(), states(4), states(2), states(2), None, specdec_batch=batch, sliding_window=3)
    assert (batch.layers_run, batch.windows) == ([0], [3])


def test_the_scale_is_the_usual_one_unless_told() -> None:
    query, key, value = states(4), states(2), states(2)
    usual, _ = attend(Layer(), query, key, value, None, specdec_batch=make_batch(5))
    usual = usual.clone()
    told, _ = attend(Layer(), query, key, value, None, specdec_batch=make_batch(5), scaling=8**-0.5)
    assert torch.equal(usual, told)
    other, _ = attend(Layer(), query, key, value, None, specdec_batch=make_batch(5), scaling=1.0)
    assert not torch.equal(usual, other)


@pytest.mark.parametrize(("heads", "head_size"), [(1, 8), (4, 8), (2, 4)])
def test_a_layer_whose_heads_are_not_the_caches_is_refused(heads: int, head_size: int) -> None:
    odd = states(heads, head_size=head_size)
    for key, value in ((odd, odd), (states(2), odd)):
        with pytest.raises(ModelLoadError, match=f"{heads} key-value heads of size {head_size}"):
            attend(Layer(), states(4, head_size=8), key, value, None, specdec_batch=make_batch(5))


def test_options_that_change_the_scores_in_other_ways_are_refused() -> None:
    bias = torch.zeros(1, 4, 5, 5)
    with pytest.raises(ModelLoadError, match="position bias"):
        attend(Layer(), states(4), states(2), states(2), None, specdec_batch=make_batch(5), position_bias=bias)


def test_options_default_to_plain_attention() -> None:
    assert AttentionOptions(scaling=0.5) == (0.5, None, None, None)
