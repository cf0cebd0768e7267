"""Which draft tokens are committed, and which token follows them: one round, from scores that are made already.

The rules' laws are those of the compiled rows: `rows.choice` (greedy, coupled) and `rows.residual` (one_hot,
rejection). Knows no ends of output: a caller cuts what lies beyond an end-of-sequence token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.draft import DraftTokens
from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.decoding.round_input import RoundInput
from specdec.decoding.rows.batch import walk_rounds
from specdec.params import AcceptanceRule, NextTokenKind, SamplingParams

_NO_HISTORY = TokenHistory(())
_AS_IT_STANDS = {
    rule: SamplingParams(temperature=0.0 if rule is AcceptanceRule.GREEDY else 1.0, acceptance_rule=rule)
    for rule in AcceptanceRule
}


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
    if len(scores) != 1 + len(draft.token_ids):
        raise ValueError(f"{len(scores)} rows of scores for {len(draft.token_ids)} draft tokens; one more is needed")
    round_ = RoundInput(_AS_IT_STANDS[rule], noise, base_position, draft, _NO_HISTORY)
    [(accepted_nodes, next_token_id)] = walk_rounds([round_], [0], scores.cpu(), scores.shape[-1])
    return acceptance(draft, accepted_nodes, next_token_id)


def acceptance(draft: DraftTokens, accepted_nodes: Sequence[int], next_token_id: int) -> Acceptance:
    """What a walk through the draft decided, with the next token's kind."""
    return Acceptance(tuple(accepted_nodes), next_token_id, _kind(draft, accepted_nodes))


def _kind(draft: DraftTokens, accepted_nodes: Sequence[int]) -> NextTokenKind:
    if not draft.token_ids:
        return NextTokenKind.PLAIN
    last_node = accepted_nodes[-1] if accepted_nodes else -1
    is_leaf = last_node not in draft.parents
    return NextTokenKind.BONUS if is_leaf else NextTokenKind.RECOVERED
