"""Which draft tokens are committed, and which token follows them: the acceptance rules behind one function.

The rules' laws are in `matching` (greedy, coupled) and `residual` (one_hot, rejection). Knows no ends of output: a
caller cuts what lies beyond an end-of-sequence token.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.draft import DraftTokens
from specdec.decoding.matching import walk_coupled, walk_greedy
from specdec.decoding.noise import Noise
from specdec.decoding.residual import one_hot_distributions, walk_residual
from specdec.params import AcceptanceRule, NextTokenKind


@dataclass(frozen=True)
class Acceptance:
    """What a round decides: nodes root first, then exactly one next token.

    The next token is recovered where a draft token stood in its place and was not accepted, bonus where the walk ended
    at a leaf, plain where there was no draft.
    """

    accepted_node_indices: tuple[int, ...]
    next_token_id: int
    next_token_kind: NextTokenKind


def accept(rule: AcceptanceRule, scores: Tensor, draft: DraftTokens, noise: Noise, base_position: int) -> Acceptance:
    """Decides the tokens from `base_position` on.

    Args:
        rule: the acceptance rule in force.
        scores: [1 + K, V] float32 from `process_logits`; row 0 follows the last committed token, row 1 + i node i.
        draft: K nodes that `check_draft` admits under the rule; K may be 0.
        noise: of this request; with epoch 0 under greedy and coupled. Greedy does not read it.
        base_position: the position of the root's children.

    Raises:
        ValueError: scores do not have one row for each node and one more, or rejection lacks distributions.
    """
    num_draft_tokens = len(draft.token_ids)
    if len(scores) != 1 + num_draft_tokens:
        raise ValueError(f"{len(scores)} rows of scores for {num_draft_tokens} draft tokens; one more is needed")
    match rule:
        case AcceptanceRule.GREEDY:
            accepted_nodes, next_token_id = walk_greedy(scores, draft)
        case AcceptanceRule.COUPLED:
            accepted_nodes, next_token_id = walk_coupled(scores, draft, noise, base_position)
        case AcceptanceRule.ONE_HOT:
            draft_probs = one_hot_distributions(draft)
            accepted_nodes, next_token_id = walk_residual(scores, draft, draft_probs, noise, base_position)
        case AcceptanceRule.REJECTION:
            draft_probs = list(draft.draft_probs or ())
            if len(draft_probs) != num_draft_tokens:
                raise ValueError("rejection needs the distribution that each draft token was drawn from")
            accepted_nodes, next_token_id = walk_residual(scores, draft, draft_probs, noise, base_position)
    return Acceptance(tuple(accepted_nodes), next_token_id, _kind(draft, accepted_nodes))


def _kind(draft: DraftTokens, accepted_nodes: list[int]) -> NextTokenKind:
    if not draft.token_ids:
        return NextTokenKind.PLAIN
    last_row = 1 + accepted_nodes[-1] if accepted_nodes else 0
    return NextTokenKind.RECOVERED if draft.children_of_row[last_row] else NextTokenKind.BONUS
