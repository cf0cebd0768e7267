"""A model's forward on a CUDA device: integers in by one copy, a recorded graph of the right shape, logits out.

A shape is (rows, wanted rows). Rows come padded to a count that the self-check has found; wanted rows are padded to the
smallest such count or to all rows, so that there are two graphs for each. A row's bits are the same in all of them
because every kernel computes it alone (attention, norms, elementwise work) or was seen to (matrix products). The latter
is a finding, not a construction: cuBLAS chooses its algorithm by shape. Neither its workspace setting nor torch's
deterministic algorithms change that; they promise the same bits for the same shapes, which is why shapes are fixed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.errors import ModelLoadError
from specdec.model.attention_plan import AttentionPlan
from specdec.model.cuda.graphs import CudaGraphRecorder, GraphedForwards, Recorder
from specdec.model.cuda.paged_attention import CudaPagedAttention, idle_plan
from specdec.model.paged_attention import PagedAttention

RunModel = Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]
"""Token ids [1, M], positions [1, M], wanted rows [W] and the plan, to logits [W, V] float32."""


def cuda_forward(run_model: RunModel, attention: PagedAttention, device: torch.device) -> "CudaForward":
    """Raises ModelLoadError where attention is another device's."""
    if not isinstance(attention, CudaPagedAttention):
        raise ModelLoadError("a model on a CUDA device needs the attention of such devices")
    return CudaForward(run_model, attention, CudaGraphRecorder(device))


class CudaForward:
    def __init__(self, run_model: RunModel, attention: CudaPagedAttention, recorder: Recorder) -> None:
        self._run_model, self._attention = run_model, attention
        self._forwards = GraphedForwards(self._forward, recorder)
        self._smallest_count = 1

    @property
    def recorded_shapes(self) -> tuple[tuple[int, int], ...]:
        return self._forwards.shapes

    def record(self, row_counts: Sequence[int]) -> None:
        """Records the forwards of these numbers of rows, of none where there are none, in place of those before.

        Nothing of any session is read or written meanwhile.
        """
        self._smallest_count = min(row_counts, default=self._smallest_count)
        self._attention.begin(idle_plan(1))
        self._forwards.record({(rows, wanted) for rows in row_counts for wanted in (self._smallest_count, rows)})

    def logits(self, plan: AttentionPlan, token_ids: Sequence[int], wanted_rows: Sequence[int]) -> Tensor:
        """[W, V] float32, the caller's own. The plan is padded to an allowed number of rows.

        Returns when the device is done: how long forwards take is measured by the clock of who calls.
        """
        num_rows, num_wanted = len(plan.num_keys), len(wanted_rows)
        self._attention.begin(plan, token_ids, wanted_rows)
        padded = self._smallest_count if num_wanted <= self._smallest_count else num_rows
        logits = self._forwards.run(num_rows, min(padded, num_rows))[:num_wanted].clone()
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return logits

    def _forward(self, num_rows: int, num_wanted: int) -> Tensor:
        attention = self._attention
        if len(attention.plan.num_keys) != num_rows:
            attention.begin(idle_plan(num_rows))
        rows = attention.rows
        return self._run_model(
            rows.token_ids.long()[None],
            rows.positions.long()[None],
            rows.wanted_rows[:num_wanted].long(),
            attention.plan,
        )
