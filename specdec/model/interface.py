"""What servers see of a model, whether it has weights or not. Knows promises; refuses to know how they are kept.

Legend: R rows of one session, W rows with logits, V vocabulary (the model's logit rows).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.messages import Numerics
from specdec.model.block_pool import BlockPool
from specdec.model.kv_cache import KVCache
from specdec.model.runner import Rows


class Runner(Protocol):
    """ModelRunner and SyntheticRunner. Called from one thread.

    Attributes:
        pool: the blocks of all caches.
        kv_bytes_per_token: of a cache.
        kv_budget_bytes: of all caches together.
        max_rows: of one forward, over all its sessions.
        step_rows: of one forward where no setting says otherwise: prompts that are read in such chunks keep nobody
            waiting for long.
        vocabulary_size: V, padding rows included.
        context_limit: most positions of a session.
    """

    @property
    def pool(self) -> BlockPool: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def kv_budget_bytes(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def step_rows(self) -> int: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def context_limit(self) -> int: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def device(self) -> torch.device: ...

    def new_cache(self, salt: bytes = b"") -> KVCache:
        """An empty cache. Prefixes are shared among caches of one salt alone."""
        ...

    def forward_rows(self, batch: Sequence[Rows]) -> Tensor:
        """Appends each session's rows to its cache; returns [W, V] float32, rows with logits in the batch's order.

        Raises ValueError for rows that make no sense, and OutOfBlocksError; then no cache has grown.
        """
        ...

    def forward(self, batch: Sequence[Rows]) -> list[Tensor]:
        """The same for each session: [R - logits_from, V]."""
        ...
