"""From rounds to records, and back to decisions: the Python side of the kernels.

Keys and uniform numbers are made here, one or two for each depth of a draft; Gumbel values, one for each token, are the
kernels' own.

Shapes: R rows, N vocabulary_size, K nodes of a draft.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import openmp
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise, Purpose
from specdec.decoding.round_input import RoundInput
from specdec.decoding.rows.arithmetic import BLOCK
from specdec.decoding.rows.deciding import walk_drafts
from specdec.decoding.rows.records import BATCH, COUPLED, DEPTH, GREEDY, NODE, RESIDUAL, ROUND
from specdec.decoding.rows.scoring import score_rows
from specdec.decoding.rows.truncation import DIGIT_BUCKETS
from specdec.params import AcceptanceRule, SamplingParams

_RULES = {
    AcceptanceRule.GREEDY: GREEDY,
    AcceptanceRule.COUPLED: COUPLED,
    AcceptanceRule.ONE_HOT: RESIDUAL,
    AcceptanceRule.REJECTION: RESIDUAL,
}
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_FEW_ROWS = 1
"""Another thread would not have woken before these are done."""


def walk_rounds(
    rounds: Sequence[RoundInput], first_rows: Sequence[int], logits: Tensor, vocabulary_size: int
) -> list[tuple[list[int], int]]:
    """Accepted nodes, root first, and the next token of each round; NOTHING for it where its logits are no numbers.

    Args:
        first_rows: where in the logits each round's 1 + K rows begin.
        logits: [R, V] float32 on the CPU.
    """
    batch = _Batch(rounds, first_rows, vocabulary_size)
    batch.run(walk_drafts, logits)
    return batch.decisions()


def make_scores(rounds: Sequence[RoundInput], logits: Tensor, vocabulary_size: int) -> Tensor:
    """Scores [R, N] float32 of rounds without drafts, each with a row of logits [R, V]."""
    scores = torch.empty((len(rounds), vocabulary_size), dtype=torch.float32)
    batch = _Batch(rounds, range(len(rounds)), vocabulary_size)
    batch.run(score_rows, logits, scores)
    return scores


def edits(params: SamplingParams, has_early_rows: bool) -> bool:
    """Whether the parameters change scores by more than temperature and truncation."""
    listed = params.allowed_token_ids or params.banned_token_ids or params.logit_bias
    return bool(listed) or penalises(params) or has_early_rows


def reshapes(params: SamplingParams, vocabulary_size: int) -> bool:
    """Whether temperature or truncation changes scores."""
    truncates = params.min_p > 0 or 0 < params.top_k < vocabulary_size or params.top_p < 1
    return params.temperature > 0 and (params.temperature != 1 or truncates)


def penalises(params: SamplingParams) -> bool:
    """Whether tokens that were seen have other scores than they would have had."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class _Batch:
    """Records under construction. Lists first: numpy fills an array of many items at once fastest."""

    def __init__(self, rounds: Sequence[RoundInput], first_rows: Sequence[int], vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._nodes: list[tuple[int, int, int, int, float, int, int]] = []
        self._depths: list[tuple[int, float, float]] = []
        self._listed_ids: list[int] = []
        self._biases: list[float] = []
        self._drafted_ids: list[NDArray[np.int32]] = []
        self._drafted_probs: list[NDArray[np.float64]] = []
        self._num_drafted = 0
        self._kept_alive: list[Any] = []
        records = [self._round(round_, first_row) for round_, first_row in zip(rounds, first_rows, strict=True)]
        self._rounds = np.array(records, dtype=ROUND)
        self._node_records = np.array(self._nodes, dtype=NODE)

    def run(self, kernel: Any, logits: Tensor, scores: Tensor | None = None) -> None:
        """Runs a kernel over the rounds, on threads where there are several."""
        logits = logits.float() if logits.stride(-1) == 1 else logits.float().contiguous()
        num_threads = torch.get_num_threads()
        workspace = _workspace(num_threads, -(-self._vocabulary_size // BLOCK))
        depths = np.array(self._depths, dtype=DEPTH)
        listed_ids = np.array(self._listed_ids, dtype=np.int32)
        listed_biases = np.array(self._biases, dtype=np.float32)
        drafted_ids = _joined(self._drafted_ids, np.int32)
        drafted_probs = _joined(self._drafted_probs, np.float64)
        paths = np.empty((num_threads, 2, len(self._nodes)), dtype=np.int32)
        path_scores = np.empty((num_threads, len(self._nodes)), dtype=np.float32)
        record = (
            self._vocabulary_size,
            len(self._rounds),
            self._rounds.ctypes.data,
            len(logits),
            logits.data_ptr(),
            logits.stride(0),
            0 if scores is None else scores.data_ptr(),
            len(self._nodes),
            self._node_records.ctypes.data,
            len(depths),
            depths.ctypes.data,
            len(listed_ids),
            listed_ids.ctypes.data,
            listed_biases.ctypes.data,
            self._num_drafted,
            drafted_ids.ctypes.data,
            drafted_probs.ctypes.data,
            num_threads,
            *workspace,
            paths.ctypes.data,
            path_scores.ctypes.data,
        )
        batch = np.array([record], dtype=BATCH)
        openmp.run(kernel, batch, alone=len(self._rounds) <= _FEW_ROWS)

    def decisions(self) -> list[tuple[list[int], int]]:
        """What `walk_drafts` wrote."""
        accepted = self._node_records["accepted"].tolist()
        return [
            (accepted[first : first + number], next_token_id)
            for first, number, next_token_id in self._rounds[["first_node", "num_accepted", "next_token_id"]].tolist()
        ]

    def _round(self, round_: RoundInput, first_row: int) -> tuple[Any, ...]:
        params, draft = round_.params, round_.draft
        rule = params.rule
        first_node, first_depth = len(self._nodes), len(self._depths)
        is_penalised = penalises(params)
        num_early = max(0, params.min_tokens - round_.history.num_output_tokens) if round_.suppressed_token_ids else 0
        first_listed = len(self._listed_ids)
        biased = params.logit_bias
        self._listed_ids += params.allowed_token_ids
        self._listed_ids += params.banned_token_ids
        if num_early:
            self._listed_ids += round_.suppressed_token_ids
        self._biases += [0.0] * (len(self._listed_ids) - len(self._biases))
        self._listed_ids += biased
        self._biases += biased.values()
        seen_ids, seen_counts = round_.history.seen() if is_penalised else _NOTHING_SEEN
        self._kept_alive += (seen_ids, seen_counts)
        depths = _depths(draft)
        self._add_noise(round_.noise, round_.base_position, rule, draft, depths)
        self._add_nodes(round_, rule, depths, is_penalised)
        return (
            _RULES[rule],
            first_row,
            first_node,
            len(draft.token_ids),
            first_depth,
            num_early,
            params.temperature if rule is AcceptanceRule.GREEDY else max(params.temperature, _SMALLEST_TEMPERATURE),
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            params.min_p,
            params.top_p,
            params.top_k if params.top_k < self._vocabulary_size else 0,
            first_listed,
            len(params.allowed_token_ids),
            len(params.banned_token_ids),
            len(round_.suppressed_token_ids) if num_early else 0,
            len(biased),
            is_penalised,
            len(seen_ids),
            seen_ids.ctypes.data,
            seen_counts.ctypes.data,
            0,
            0,
        )

    def _add_noise(
        self, noise: Noise, base_position: int, rule: AcceptanceRule, draft: DraftTokens, depths: Sequence[int]
    ) -> None:
        num_depths = max(depths, default=-1) + 2
        if rule is AcceptanceRule.GREEDY:
            self._depths += [(0, 0.0, 0.0)] * num_depths
        elif rule is AcceptanceRule.COUPLED:
            positions = range(base_position, base_position + num_depths)
            self._depths += [(noise.key(position, Purpose.TARGET_SAMPLE), 0.0, 0.0) for position in positions]
        else:
            # A draw from the target follows a leaf, one from a residual a row that has children.
            drawn: list[dict[Purpose, float]] = [{} for _ in range(num_depths)]
            for children, depth in zip(draft.children_of_row, (0, *(1 + depth for depth in depths)), strict=True):
                purpose = Purpose.RECOVER if children else Purpose.TARGET_SAMPLE
                if purpose not in drawn[depth]:
                    drawn[depth][purpose] = noise.uniform(base_position + depth, purpose)
            self._depths += [
                (0, numbers.get(Purpose.TARGET_SAMPLE, 0.0), numbers.get(Purpose.RECOVER, 0.0)) for numbers in drawn
            ]

    def _add_nodes(self, round_: RoundInput, rule: AcceptanceRule, depths: Sequence[int], is_penalised: bool) -> None:
        draft = round_.draft
        counts = [round_.history.count(token_id) if is_penalised else 0 for token_id in draft.token_ids]
        numbers = [0.0] * len(draft.token_ids)
        if _RULES[rule] == RESIDUAL:
            for children in draft.children_of_row:
                for rank, node in enumerate(children):
                    numbers[node] = round_.noise.uniform(round_.base_position + depths[node], Purpose.ACCEPT, rank)
        for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            first_drafted = self._num_drafted
            if rule is AcceptanceRule.ONE_HOT:
                self._add_distribution(np.array([token_id], dtype=np.int32), np.ones(1))
            elif rule is AcceptanceRule.REJECTION:
                self._add_distribution(*_distribution(draft, node))
            num_drafted = self._num_drafted - first_drafted
            self._nodes.append((token_id, parent, counts[node], 0, numbers[node], first_drafted, num_drafted))

    def _add_distribution(self, token_ids: NDArray[np.int32], probs: NDArray[np.float64]) -> None:
        self._drafted_ids.append(token_ids)
        self._drafted_probs.append(probs)
        self._num_drafted += len(token_ids)


_NOTHING_SEEN = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
_per_thread = threading.local()


def _workspace(num_threads: int, num_blocks: int) -> Sequence[int]:
    """Addresses of memory that the kernels work in, kept: fresh pages would cost as much as the work."""
    key = (num_threads, num_blocks)
    if getattr(_per_thread, "key", None) != key:
        _per_thread.key = key
        _per_thread.memory = (
            np.empty((num_threads, 3, num_blocks * BLOCK), dtype=np.float32),  # floats
            np.empty((num_threads, num_blocks), dtype=np.float32),  # maxima
            np.empty((num_threads, num_blocks), dtype=np.float64),  # sums
            np.empty((num_threads, num_blocks * BLOCK), dtype=np.int32),  # candidates
            np.empty((num_threads, DIGIT_BUCKETS), dtype=np.float64),  # buckets
        )
        _per_thread.addresses = tuple(array.ctypes.data for array in _per_thread.memory)
    addresses: Sequence[int] = _per_thread.addresses
    return addresses


def _joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _depths(draft: DraftTokens) -> Sequence[int]:
    """[K] how many nodes lead to each."""
    if not draft.parent_indices:
        return range(len(draft.token_ids))
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _distribution(draft: DraftTokens, node: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """What a node was drawn from. Sums to 1 in double precision: the wire's float32 do so within 1e-3 only, and the
    rest would be a bias."""
    if draft.draft_probs is None or len(draft.draft_probs) != len(draft.token_ids):
        raise ValueError("rejection needs the distribution that each draft token was drawn from")
    sparse = draft.draft_probs[node]
    probs = np.asarray(sparse.probs, dtype=np.float64)
    is_full = len(sparse.token_ids) == 0
    token_ids = np.arange(len(probs), dtype=np.int32) if is_full else np.asarray(sparse.token_ids, dtype=np.int32)
    return token_ids, probs / probs.sum()
