"""Runs a causal language model over rows of many sessions in one forward.

Knows caches, positions and row counts; refuses to know what the logits are for. Everything is called from one thread.

Legend: R rows of one session, M rows of the forward with padding, V vocabulary (the model's logit rows).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.messages import Numerics
from specdec.model.attention import ATTENTION_NAME, AttentionBatch, Segment, plan_segment
from specdec.model.kv_cache import CacheLayout, KVCache
from specdec.model.linear import LinearKernel, Quantization, choose_kernel
from specdec.model.numerics import digest_of_parameters, numerics_of
from specdec.model.row_counts import RowCounts
from specdec.model.swapping import refuse_unsupported, swap_modules


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens to append to one session's cache. A chain, unless `parent_rows` says which row each one follows.

    `parent_rows[r]` is a row before r, or -1 for the cache's last position. Logits are given for the rows from
    `logits_from` on.
    """

    cache: KVCache
    token_ids: Sequence[int]
    parent_rows: Sequence[int] | None = None
    logits_from: int = 0


class ModelRunner:
    """A model on its device. `body_counts` are the row counts of its layers, `head_counts` of its output layer."""

    def __init__(self, model: PreTrainedModel, kernel: LinearKernel, weights_digest: str) -> None:
        config = model.config
        heads = config.num_attention_heads
        self.kernel = kernel
        self.device = model.device
        self.body_counts, self.head_counts = RowCounts(kernel.max_rows), RowCounts(kernel.max_rows)
        self.numerics: Numerics = numerics_of(config, weights_digest, kernel=kernel, device=self.device)
        self.vocabulary_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self._layout = CacheLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=kernel.compute_dtype,
            device=self.device,
            context_limit=self.context_limit,
        )
        self.model = model
        model.set_attn_implementation(ATTENTION_NAME)
        swap_modules(model, kernel, self.body_counts, self.head_counts)
        self._prove_that_every_layer_attends_here()

    @classmethod
    def from_hf_model(
        cls,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        quantization: Quantization = "none",
        weights_digest: str | None = None,
    ) -> Self:
        """Takes over a model that is on its device already; its modules are swapped in place.

        `dtype` is that of the weights, by default the model's own. Raises ModelLoadError for a model that cannot be run
        exactly.
        """
        refuse_unsupported(model)
        model.eval().requires_grad_(False)
        dtype = dtype or model.dtype
        digest = weights_digest or digest_of_parameters(model)
        kernel = choose_kernel(model.device, dtype, quantization)
        if model.dtype != dtype and quantization == "none":
            model.to(dtype)
        return cls(model, kernel, digest)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._layout.bytes_per_token

    @property
    def max_rows(self) -> int:
        """How many rows one forward may have, over all its sessions."""
        return self.kernel.max_rows

    def new_cache(self) -> KVCache:
        return KVCache(self._layout)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Appends each session's rows to its cache; returns per session [R - logits_from, V] float32 logits.

        Raises ValueError, before anything has changed, for more rows than `max_rows`, no rows, the same cache twice, a
        position beyond the context or a parent that does not come before its child.
        """
        segments = self._plan(batch)
        logits = self._run(batch, segments).float()  # [wanted rows, V]
        for rows in batch:
            rows.cache.extend(len(rows.token_ids))
        return list(torch.split(logits, [len(rows.token_ids) - rows.logits_from for rows in batch]))

    def _plan(self, batch: Sequence[Rows]) -> list[Segment]:
        row_counts = [len(rows.token_ids) for rows in batch]
        if not batch or min(row_counts) == 0 or sum(row_counts) > self.max_rows:
            raise ValueError(f"a forward has 1 to {self.max_rows} rows and no empty session, not {row_counts}")
        if len({id(rows.cache) for rows in batch}) != len(batch):
            raise ValueError("a session appears once in a forward")
        if any(not 0 <= rows.logits_from <= len(rows.token_ids) for rows in batch):
            raise ValueError("logits_from lies within the rows")
        first_rows = itertools.accumulate(row_counts, initial=0)
        segments = [
            plan_segment(rows.cache, first_row, num_rows, rows.parent_rows, self.kernel.compute_dtype)
            for rows, first_row, num_rows in zip(batch, first_rows, row_counts, strict=False)
        ]
        for segment, num_rows in zip(segments, row_counts, strict=True):
            segment.cache.reserve(segment.cache.length + num_rows)
        return segments

    def _run(self, batch: Sequence[Rows], segments: Sequence[Segment]) -> Tensor:
        """[wanted rows, V]. Rows added to reach an allowed count are at position 0 and attend to nothing."""
        token_ids = [token_id for rows in batch for token_id in rows.token_ids]
        positions = [segment.cache.length + depth for segment in segments for depth in segment.depths]
        wanted = [
            row
            for rows, segment in zip(batch, segments, strict=True)
            for row in range(segment.first_row + rows.logits_from, segment.end_row)
        ]
        num_rows = self.body_counts.padded(len(token_ids))
        padding = [0] * (num_rows - len(token_ids))
        output = self.model(
            input_ids=torch.tensor([token_ids + padding], device=self.device),
            position_ids=torch.tensor([positions + padding], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            specdec_batch=AttentionBatch(segments, num_rows),
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _prove_that_every_layer_attends_here(self) -> None:
        """One row: a model that keeps state of its own, or attends past our function, is refused."""
        cache = self.new_cache()
        segment = plan_segment(cache, 0, 1, None, self.kernel.compute_dtype)
        cache.reserve(1)
        batch = AttentionBatch([segment], 1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self.model(input_ids=token, position_ids=token, use_cache=False, specdec_batch=batch)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ModelLoadError(f"models of type {self.model.config.model_type} are not supported: {error}") from error
        if batch.layers_run != list(range(self._layout.num_layers)):
            raise ModelLoadError(f"models of type {self.model.config.model_type} do not attend once in every layer")
