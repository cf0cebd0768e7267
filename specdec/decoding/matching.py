"""`greedy` and `coupled`: the target's token is known before the draft is looked at, and the draft merely guesses it.

The walk goes from the root to the child that holds the target's token, and on from there. So the tokens that come out
are a function of the target alone, whoever drafted.

Shapes: K draft tokens, V vocabulary; row 0 of scores follows the last committed token, row 1 + i follows node i.
"""

from collections.abc import Callable

from torch import Tensor

from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.decoding.sampling import best_token, coupled_token


def walk_greedy(scores: Tensor, draft: DraftTokens) -> tuple[list[int], int]:
    """Nodes that hold the argmax, root first, and the argmax after them. `scores` is [1 + K, V]."""
    return _walk(draft, lambda row, _depth: best_token(scores[row]))


def walk_coupled(scores: Tensor, draft: DraftTokens, noise: Noise, base_position: int) -> tuple[list[int], int]:
    """Nodes that hold the target's own sample, root first, and the sample after them. `scores` is [1 + K, V]."""
    return _walk(draft, lambda row, depth: coupled_token(scores[row], noise, base_position + depth))


def _walk(draft: DraftTokens, target_token: Callable[[int, int], int]) -> tuple[list[int], int]:
    accepted_nodes: list[int] = []
    row = 0
    while True:
        token_id = target_token(row, len(accepted_nodes))
        node = next((child for child in draft.children_of_row[row] if draft.token_ids[child] == token_id), None)
        if node is None:
            return accepted_nodes, token_id
        accepted_nodes.append(node)
        row = 1 + node
