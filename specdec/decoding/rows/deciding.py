"""The kernel that decides rounds, each by a walk from the root of its draft.

A walk goes from row to row as draft tokens are accepted: a row that no accepted token leads to costs nothing. Rounds
are shared out among the threads; a round's walk reads nothing of another round.

Shapes: R rows, N vocabulary_size, B blocks of a row; T threads.
"""

from typing import Any

import numpy as np
from numba import carray

from specdec import openmp
from specdec.decoding.rows.arithmetic import BLOCK, Doubles, Floats, Ids, exact
from specdec.decoding.rows.choice import best_token, coupled_token
from specdec.decoding.rows.records import BATCH, COUPLED, DEPTH, NODE, NOTHING, RESIDUAL, ROUND
from specdec.decoding.rows.residual import draw, passes, subtract, weigh
from specdec.decoding.rows.scoring import score_row


@exact
def _prob_of(token_ids: Ids, probs: Doubles, token_id: int) -> float:
    for index in range(len(token_ids)):
        if token_ids[index] == token_id:
            return probs[index]  # type: ignore[no-any-return]
    return 0.0


@exact
def _decide_by_chance(
    batch: Any, nodes: Any, parent: int, noise: Any, scores: Floats, maxima: Floats, part: int
) -> tuple[int, int]:
    floats = carray(openmp.pointer(batch.floats), (batch.num_threads, 3, len(maxima) * BLOCK), np.float32)
    all_sums = carray(openmp.pointer(batch.sums), (batch.num_threads, len(maxima)), np.float64)
    drafted_ids = carray(openmp.pointer(batch.drafted_ids), (batch.num_drafted,), np.int32)
    drafted_probs = carray(openmp.pointer(batch.drafted_probs), (batch.num_drafted,), np.float64)
    weights, sums = floats[part, 1, : len(scores)], all_sums[part]
    total = weigh(scores, maxima, weights, sums)
    if not total > 0:
        return -1, NOTHING
    number = noise.target_number
    for child in range(parent + 1, len(nodes)):
        if nodes[child].parent == parent:
            number = noise.residual_number
            first, end = nodes[child].first_drafted, nodes[child].first_drafted + nodes[child].num_drafted
            token_ids, draft_probs = drafted_ids[first:end], drafted_probs[first:end]
            draft_prob = _prob_of(token_ids, draft_probs, nodes[child].token_id)
            if passes(weights, total, nodes[child].token_id, draft_prob, nodes[child].number):
                return child, nodes[child].token_id
            total = subtract(weights, sums, total, token_ids, draft_probs)
            if total == 0:  # the draft was the target, but for rounding
                total = weigh(scores, maxima, weights, sums)
                break
    return -1, draw(weights, sums, total, number)


@exact
def _decide_row(
    batch: Any, round_: Any, nodes: Any, parent: int, depth: int, scores: Floats, maxima: Floats, part: int
) -> tuple[int, int]:
    """The child of `parent` that is accepted and its token, or -1 and the next token."""
    depths = carray(openmp.pointer(batch.depths), (batch.num_depths,), DEPTH)
    noise = depths[round_.first_depth + depth]
    if round_.rule == RESIDUAL:
        return _decide_by_chance(batch, nodes, parent, noise, scores, maxima, part)
    is_coupled = round_.rule == COUPLED
    token_id = coupled_token(scores, maxima, noise.gumbel_key) if is_coupled else best_token(scores, maxima)
    for child in range(parent + 1, len(nodes)):
        if nodes[child].parent == parent and nodes[child].token_id == token_id:
            return child, token_id
    return -1, token_id


@openmp.kernel(BATCH)
def walk_drafts(arguments: Any) -> None:
    """Walks every round's draft from the root, and writes what it decides into the rounds and the nodes."""
    batch = carray(arguments, 1)[0]
    rounds = carray(openmp.pointer(batch.rounds), (batch.num_rounds,), ROUND)
    nodes = carray(openmp.pointer(batch.nodes), (batch.num_nodes,), NODE)
    num_blocks = (batch.vocabulary_size + BLOCK - 1) // BLOCK
    all_maxima = carray(openmp.pointer(batch.maxima), (batch.num_threads, num_blocks), np.float32)
    all_floats = carray(openmp.pointer(batch.floats), (batch.num_threads, 3, num_blocks * BLOCK), np.float32)
    paths = carray(openmp.pointer(batch.paths), (batch.num_threads, 2, batch.num_nodes), np.int32)
    part = openmp.part_index()
    scores, maxima = all_floats[part, 0, : batch.vocabulary_size], all_maxima[part]
    for index in range(part, batch.num_rounds, openmp.num_parts()):
        round_ = rounds[index]
        own_nodes = nodes[round_.first_node : round_.first_node + round_.num_nodes]
        node, depth = -1, 0
        while True:
            row_scores = score_row(batch, round_, round_.first_row + 1 + node, depth, scores, maxima, part)
            node, token_id = _decide_row(batch, round_, own_nodes, node, depth, row_scores, maxima, part)
            if node < 0:
                break
            own_nodes[depth].accepted = node
            paths[part, 0, depth] = token_id
            paths[part, 1, depth] = own_nodes[node].count
            depth += 1
        round_.num_accepted = depth
        round_.next_token_id = token_id
