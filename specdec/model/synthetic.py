"""A model without weights: logits that follow from the token prefix, and forwards that take a chosen time.

For measuring everything but a model, at a scale where no model could run. It has the paged cache, the block tables and
the plan of real models; in a slot lies a hash instead of keys, so that a fault of the cache changes the output as it
would with a real one. A forward sleeps, it computes next to nothing. Two models of one seed, one with `acceptance`
below 1, are a target and a draft model whose guesses are right that often.
"""

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.messages import Numerics, SelfCheck
from specdec.model.attention_plan import SessionRows, plan_attention, refuse_bad_tree
from specdec.model.block_pool import BLOCK_SIZE, BlockPool
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.runner import Rows, reserve_all
from specdec.model.synthetic_law import append_states, noise_table, write_logits
from specdec.model.synthetic_options import SyntheticOptions
from specdec.model.synthetic_tokenizer import END_TOKEN_ID, FIRST_WORD_ID

MAX_ROWS = 4096
STEP_ROWS = 512
_VERSION = "1"
_DEFAULT_SESSIONS = 256
"""So many of full context fit the cache where no budget is given: 16 bytes a position, touched when they are used."""


class SyntheticRunner:
    """What ModelRunner promises, without a model. `sleep` and `clock` are for the latency alone."""

    kv_bytes_per_token: int
    max_rows = MAX_ROWS
    step_rows = STEP_ROWS

    def __init__(
        self,
        options: SyntheticOptions,
        *,
        kv_budget_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = torch.device("cpu")
        self.vocabulary_size = options.vocabulary_size
        self.context_limit = options.context_limit
        self.numerics = _numerics_of(options)
        self._options = options
        self._clock, self._sleep = clock, sleep
        layout = CacheLayout(
            num_layers=1,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.int64,
            device=self.device,
            context_limit=options.context_limit,
        )
        self.kv_bytes_per_token = layout.bytes_per_token
        wanted_bytes = _DEFAULT_SESSIONS * options.context_limit * layout.bytes_per_token
        self.kv_budget_bytes = wanted_bytes if kv_budget_bytes is None else kv_budget_bytes
        self.pool = BlockPool(max(1, self.kv_budget_bytes // layout.bytes_per_block))
        self._storage = KVStorage(layout, self.pool.num_blocks)
        self._slots = self._storage.keys[0].view(-1).numpy().view(np.uint64)  # [slots of all blocks]
        self._noise = noise_table(options.seed, options.vocabulary_size)

    def new_cache(self, salt: bytes = b"") -> KVCache:
        return KVCache(self.pool, self._storage, salt)

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """Per session [R - logits_from, V]; otherwise as `forward_rows`."""
        logits = self.forward_rows(batch)
        return list(torch.split(logits, [len(rows.token_ids) - rows.logits_from for rows in batch]))

    def forward_rows(self, batch: Sequence[Rows]) -> Tensor:
        """Appends each session's rows to its cache; returns the wanted rows' logits [W, V] float32.

        Raises ValueError for what ModelRunner refuses, and OutOfBlocksError, before any cache has grown.
        """
        started_at = self._clock()
        self._check(batch)
        reserve_all(batch)
        states = self._append(batch)  # [M]
        first_rows = itertools.accumulate((len(rows.token_ids) for rows in batch), initial=0)
        wanted = np.concatenate(
            [
                states[first_row + rows.logits_from : first_row + len(rows.token_ids)]
                for rows, first_row in zip(batch, first_rows, strict=False)
            ]
        )
        logits = torch.empty(len(wanted), self.vocabulary_size)
        options = self._options
        write_logits(
            wanted, self._noise, FIRST_WORD_ID, END_TOKEN_ID, options.acceptance, options.end_rate, logits.numpy()
        )
        for rows in batch:
            rows.cache.extend(len(rows.token_ids))
        time_left_s = started_at + options.times.expected_s(len(states)) - self._clock()
        if time_left_s > 0:
            self._sleep(time_left_s)
        return logits

    def _check(self, batch: Sequence[Rows]) -> None:
        row_counts = [len(rows.token_ids) for rows in batch]
        if not batch or min(row_counts) == 0 or sum(row_counts) > self.max_rows:
            raise ValueError(f"a forward has 1 to {self.max_rows} rows and no empty session, not {row_counts}")
        if len({id(rows.cache) for rows in batch}) != len(batch):
            raise ValueError("a session appears once in a forward")
        if any(not 0 <= rows.logits_from <= len(rows.token_ids) for rows in batch):
            raise ValueError("logits_from lies within the rows")
        for rows in batch:
            refuse_bad_tree(len(rows.token_ids), rows.parent_rows)
            if rows.cache.length + len(rows.token_ids) > self.context_limit:
                raise ValueError(f"the rows do not fit a context of {self.context_limit}")
            if min(rows.token_ids) < 0 or max(rows.token_ids) >= self.vocabulary_size:
                raise ValueError("a token id is outside the vocabulary")

    def _append(self, batch: Sequence[Rows]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        token_ids = np.array([token_id for rows in batch for token_id in rows.token_ids], dtype=np.int64)
        sessions = [SessionRows(rows.cache, len(rows.token_ids), rows.parent_rows) for rows in batch]
        plan = plan_attention(sessions, len(token_ids))
        states = np.empty(len(token_ids), dtype=np.uint64)
        append_states(
            np.uint64(self._options.seed),
            token_ids,
            plan.positions,
            plan.num_direct_keys,
            plan.ancestor_slots,
            plan.sessions,
            plan.block_tables,
            plan.write_slots,
            self._slots,
            states,
        )
        return states


def check_synthetic(runner: SyntheticRunner) -> SelfCheck:
    """What run_self_check proves of a real model, in one comparison: rows alone say what they say in a chunk.

    Compiles what a forward needs, and leaves no session behind.
    """
    started_at = time.monotonic()
    generator = random.Random(7)  # noqa: S311 - a fixed probe, not a secret
    num_tokens = min(BLOCK_SIZE + 4, runner.context_limit)
    token_ids = [generator.randrange(runner.vocabulary_size) for _ in range(num_tokens)]
    whole, alone = runner.new_cache(), runner.new_cache()
    expected = runner.forward_rows([Rows(whole, token_ids)])
    logits = torch.cat([runner.forward_rows([Rows(alone, [token_id])]) for token_id in token_ids])
    whole.free()
    alone.free()
    passed = torch.equal(logits, expected)
    return SelfCheck(
        passed=passed,
        max_rows=runner.max_rows,
        safe_row_counts=(runner.max_rows,),
        num_comparisons=num_tokens,
        detail=f"{num_tokens} rows bitwise equal" if passed else "rows alone differ from rows in a chunk",
        elapsed_s=time.monotonic() - started_at,
    )


def _numerics_of(options: SyntheticOptions) -> Numerics:
    """Everything that decides a logit; times decide none."""
    law = f"synthetic law {_VERSION}, seed {options.seed}, {options.vocabulary_size} ids"
    chosen = f"acceptance {options.acceptance!r}, end rate {options.end_rate!r}"
    facts = {
        "weights_digest": hashlib.sha256(f"{law}, {chosen}".encode()).hexdigest(),
        "weights_dtype": "none",
        "compute_dtype": "float32",
        "device": "none",
        "linear_kernel": "none",
        "attention_kernel": f"synthetic {_VERSION}",
        "libraries": f"numpy {np.__version__}",
    }
    text = " ".join(facts.values())
    return Numerics(fingerprint=hashlib.sha256(text.encode()).hexdigest(), **facts)
