"""Runs a causal language model over rows of many sessions in one forward.

Knows caches, positions and row counts; refuses to know what the logits are for. Everything is called from one thread.

Legend: R rows of one session, M rows of the forward with padding, W rows with logits, V vocabulary (the model's logit
rows).
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import ModelLoadError
from specdec.messages import Numerics
from specdec.model.attention import ATTENTION_NAME, AttentionBatch, OutputBuffer
from specdec.model.attention_plan import AttentionPlan, SessionRows, plan_attention, refuse_bad_tree
from specdec.model.block_pool import BLOCK_SIZE, BlockPool, OutOfBlocksError
from specdec.model.exact_elementwise import ExactElementwise
from specdec.model.kv_budget import default_kv_budget_bytes
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.linear import LinearKernel, Quantization, choose_kernel
from specdec.model.numerics import digest_of_parameters, numerics_of
from specdec.model.paged_attention import paged_attention
from specdec.model.refusals import refuse_unsupported
from specdec.model.row_counts import RowCounts
from specdec.model.swapping import swap_modules

if TYPE_CHECKING:
    from specdec.model.cuda.forward import CudaForward

MAX_CPU_ROWS = 512
"""Of one forward. A limit of policy: linear layers split what exceeds their own largest exact count."""
CPU_STEP_ROWS = 64
"""A CPU is bound by arithmetic long before: more rows take as much longer, and everybody waits for all of them."""
MIN_POOL_POSITIONS = 128


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
    """A model on its device, and the pool of its keys and values.

    `body_counts` are the row counts of its layers, `head_counts` of its output layer.
    """

    def __init__(
        self, model: PreTrainedModel, kernel: LinearKernel, weights_digest: str, kv_budget_bytes: int | None = None
    ) -> None:
        config = model.config
        self.kernel = kernel
        self.device = model.device
        self.body_counts, self.head_counts = RowCounts(kernel.max_rows), RowCounts(kernel.max_rows)
        self.numerics: Numerics = numerics_of(config, weights_digest, kernel=kernel, device=self.device)
        self.vocabulary_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self.max_rows = MAX_CPU_ROWS if self.device.type == "cpu" else kernel.max_rows
        """How many rows one forward may have, over all its sessions."""
        layout = _cache_layout(model, kernel.compute_dtype)
        self.kv_bytes_per_token = layout.bytes_per_token
        self.kv_budget_bytes = default_kv_budget_bytes(layout) if kv_budget_bytes is None else kv_budget_bytes
        self.pool = BlockPool(_num_blocks(layout, self.kv_budget_bytes))
        self.storage = KVStorage(layout, self.pool.num_blocks)
        self._attention = paged_attention(self.storage, self.max_rows)
        self.cuda_forward = self._forward_on_cuda()
        self._outputs = OutputBuffer(layout)
        self.model = model
        model.set_attn_implementation(ATTENTION_NAME)
        swap_modules(model, kernel, self.body_counts, self.head_counts)
        self._elementwise = ExactElementwise()
        self._prove_that_every_layer_attends_here()

    @classmethod
    def from_hf_model(
        cls,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        quantization: Quantization = "none",
        weights_digest: str | None = None,
        kv_budget_bytes: int | None = None,
    ) -> Self:
        """Takes over a model that is on its device already; its modules are swapped in place.

        `dtype` is that of the weights, by default the model's own. `kv_budget_bytes` is for keys and values of all
        sessions, by default a share of the free memory. Raises ModelLoadError for a model that cannot be run exactly.
        """
        refuse_unsupported(model)
        model.eval().requires_grad_(False)
        dtype = dtype or model.dtype
        digest = weights_digest or digest_of_parameters(model)
        kernel = choose_kernel(model.device, dtype, quantization)
        if model.dtype != dtype and quantization == "none":
            model.to(dtype)
        return cls(model, kernel, digest, kv_budget_bytes)

    @property
    def step_rows(self) -> int:
        """How many rows a forward should have at most where no setting says otherwise."""
        return min(CPU_STEP_ROWS, self.max_rows) if self.device.type == "cpu" else self.max_rows

    def use_row_counts(self, counts: Iterable[int]) -> None:
        """Layers run on these numbers of rows from now on. On CUDA one forward has no more than the largest, and each
        is recorded."""
        self.body_counts.use(counts)
        if self.cuda_forward is not None:
            self.max_rows = self.body_counts.largest
            self.cuda_forward.record(self.body_counts.counts)

    def new_cache(self, salt: bytes = b"") -> KVCache:
        """An empty cache. Prefixes are shared between caches of equal salt only."""
        return KVCache(self.pool, self.storage, salt)

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """As `forward_rows`, split per session: [R - logits_from, V] float32 views."""
        return list(torch.split(self.forward_rows(batch), [len(rows.token_ids) - rows.logits_from for rows in batch]))

    @torch.inference_mode()
    def forward_rows(self, batch: Sequence[Rows]) -> Tensor:
        """Appends each session's rows to its cache; returns [W, V] float32 logits in the order of the batch.

        Raises, before anything has changed: ValueError for more rows than `max_rows`, no rows, the same cache twice, a
        position beyond the context or a parent that does not come before its child; OutOfBlocksError.
        """
        self._refuse_bad_batch(batch)
        reserve_all(batch)
        num_rows = self.body_counts.padded(sum(len(rows.token_ids) for rows in batch))
        plan = plan_attention(
            [SessionRows(rows.cache, len(rows.token_ids), rows.parent_rows) for rows in batch], num_rows
        )
        logits = self._run(batch, plan)  # [W, V]
        for rows in batch:
            rows.cache.extend(len(rows.token_ids))
        return logits

    def _refuse_bad_batch(self, batch: Sequence[Rows]) -> None:
        row_counts = [len(rows.token_ids) for rows in batch]
        if not batch or min(row_counts) == 0 or sum(row_counts) > self.max_rows:
            raise ValueError(f"a forward has 1 to {self.max_rows} rows and no empty session, not {row_counts}")
        if len({id(rows.cache) for rows in batch}) != len(batch):
            raise ValueError("a session appears once in a forward")
        for rows, num_rows in zip(batch, row_counts, strict=True):
            if not 0 <= rows.logits_from <= num_rows:
                raise ValueError("logits_from lies within the rows")
            if rows.cache.length + num_rows > self.context_limit:
                raise ValueError(
                    f"{rows.cache.length + num_rows} positions do not fit a context of {self.context_limit}"
                )
            refuse_bad_tree(num_rows, rows.parent_rows)

    def _run(self, batch: Sequence[Rows], plan: AttentionPlan) -> Tensor:
        """[W, V]. Rows added to reach an allowed count are at position 0 and attend to nothing."""
        token_ids = [token_id for rows in batch for token_id in rows.token_ids]
        wanted = [
            first_row + row
            for rows, first_row in zip(batch, plan.first_rows.tolist(), strict=False)
            for row in range(rows.logits_from, len(rows.token_ids))
        ]
        if self.cuda_forward is not None:
            return self.cuda_forward.logits(plan, token_ids, wanted)
        padding = [0] * (len(plan.positions) - len(token_ids))
        positions = torch.from_numpy(plan.positions)
        return self._run_model(torch.tensor([token_ids + padding]), positions[None], torch.tensor(wanted).long(), plan)

    def _run_model(self, token_ids: Tensor, positions: Tensor, wanted_rows: Tensor, plan: AttentionPlan) -> Tensor:
        """Token ids [1, M], positions [1, M], wanted rows [W], int64 on the device, to logits [W, V] float32."""
        with self._elementwise if self._elementwise.was_needed else contextlib.nullcontext():
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=wanted_rows,
                specdec_batch=AttentionBatch(self._attention, plan, self._outputs),
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _forward_on_cuda(self) -> "CudaForward | None":
        if self.device.type != "cuda":
            return None
        from specdec.model.cuda.forward import cuda_forward

        return cuda_forward(self._run_model, self._attention, self.device)

    @torch.inference_mode()
    def _prove_that_every_layer_attends_here(self) -> None:
        """One row: a model that keeps state of its own, or attends past our function, is refused. Shows, too, whether
        its code calls elementwise functions by itself."""
        config, cache = self.model.config, self.new_cache()
        cache.reserve(1)
        batch = AttentionBatch(self._attention, plan_attention([SessionRows(cache, 1)], 1), self._outputs)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with self._elementwise.watching(self.model):
                self.model(input_ids=token, position_ids=token, use_cache=False, specdec_batch=batch)
        except (TypeError, RuntimeError, AttributeError, IndexError) as error:
            raise ModelLoadError(f"models of type {config.model_type} are not supported: {error}") from error
        finally:
            cache.free()
        if batch.layers_run != list(range(config.num_hidden_layers)):
            raise ModelLoadError(f"models of type {config.model_type} do not attend once in every layer")
        layer_types = getattr(config, "layer_types", None) or batch.windows
        for layer_type, window in zip(layer_types, batch.windows, strict=True):
            # What transformers says by a mask alone, in place of an option, would be lost here.
            if (layer_type == "sliding_attention" and window is None) or (layer_type == "full_attention" and window):
                raise ModelLoadError(f"models of type {config.model_type} do not say which layers have a window")


def _cache_layout(model: PreTrainedModel, compute_dtype: torch.dtype) -> CacheLayout:
    config = model.config
    heads = config.num_attention_heads
    # A CPU has no arithmetic for float16: keys in float32 cost memory, not time.
    is_half_on_cpu = model.device.type == "cpu" and compute_dtype == torch.float16
    return CacheLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=torch.float32 if is_half_on_cpu else compute_dtype,
        device=model.device,
        context_limit=config.max_position_embeddings,
    )


def _num_blocks(layout: CacheLayout, budget_bytes: int) -> int:
    """Raises ModelLoadError where the budget holds too little to work with."""
    num_blocks = budget_bytes // layout.bytes_per_block
    needed = min(MIN_POOL_POSITIONS, layout.context_limit)
    if num_blocks * BLOCK_SIZE < needed:
        raise ModelLoadError(
            f"a budget of {budget_bytes} bytes for keys and values holds {num_blocks * BLOCK_SIZE} positions, "
            f"at least {needed} are needed"
        )
    return num_blocks


def reserve_all(batch: Sequence[Rows]) -> None:
    """Makes room for every session's rows, or raises OutOfBlocksError and for none."""
    for done, rows in enumerate(batch):
        try:
            rows.cache.reserve(rows.cache.length + len(rows.token_ids))
        except OutOfBlocksError:
            for earlier in batch[:done]:
                earlier.cache.rollback(earlier.cache.length)
            raise
