"""Decides the rounds of many sessions at once, each with parameters, a rule, a draft and a history of its own.

What is decided for a round depends on nothing else in the batch. Knows rows of logits; knows no session and no model.

Shapes: K draft tokens of a round, V logit rows of the model; R the sum of 1 + K over the rounds.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.acceptance import Acceptance, accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.history import TokenHistory
from specdec.decoding.logprobs import token_logprobs
from specdec.decoding.noise import Noise
from specdec.decoding.processing import process_logits
from specdec.messages import PositionLogprobs
from specdec.params import SamplingParams

__all__ = ["RoundDecision", "RoundInput", "TokenHistory", "decide_rounds", "token_logprobs", "warm_up"]


@dataclass(frozen=True)
class RoundInput:
    """Everything but the logits that decides a round.

    `base_position` is the position of the first token to be decided; `history` ends before it. `suppressed_token_ids`
    end an output, and are impossible before min_tokens. `num_logprobs` asks for log-probabilities: None for none, 0
    for those of the decided tokens, n for the n most likely alternatives too.
    """

    params: SamplingParams
    noise: Noise
    base_position: int
    draft: DraftTokens
    history: TokenHistory
    suppressed_token_ids: Collection[int] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True)
class RoundDecision:
    """What is committed, and the log-probabilities of the accepted tokens and the next one, if they were asked for."""

    acceptance: Acceptance
    logprobs: Sequence[PositionLogprobs] = ()


def decide_rounds(rounds: Sequence[RoundInput], logits: Tensor, vocabulary_size: int) -> list[RoundDecision]:
    """Decides each round from its 1 + K rows of logits [R, V] float32, those of the first round first.

    Args:
        rounds: with drafts that `check_draft` admits, and params that `require_possible_token` leaves a token.
        logits: finite; on any device. Never written to.
        vocabulary_size: ids from here on are padding and are never decided.

    Raises:
        ValueError: the rows are not those of the rounds.
    """
    num_rows = sum(1 + len(round_.draft.token_ids) for round_ in rounds)
    if len(logits) != num_rows:
        raise ValueError(f"{len(logits)} rows of logits for rounds of {num_rows}")
    decisions = []
    first_row = 0
    for round_ in rounds:
        end_row = first_row + 1 + len(round_.draft.token_ids)
        decisions.append(_decide(round_, logits[first_row:end_row], vocabulary_size))
        first_row = end_row
    return decisions


def warm_up(vocabulary_size: int) -> None:
    """Compiles what decisions need, so that the first round is as fast as the others."""


def _decide(round_: RoundInput, logits: Tensor, vocabulary_size: int) -> RoundDecision:
    draft = round_.draft
    output = list(round_.history.output_counts.elements())
    paths = [[], *(draft.path_to(node) for node in range(len(draft.token_ids)))]
    scores = process_logits(
        logits,
        round_.params,
        prompt_token_ids=list(round_.history.prompt_token_ids),
        output_token_ids_per_row=[[*output, *path] for path in paths],
        suppressed_token_ids=round_.suppressed_token_ids,
        vocabulary_size=vocabulary_size,
    )
    acceptance = accept(round_.params.rule, scores, draft, round_.noise, round_.base_position)
    if round_.num_logprobs is None:
        return RoundDecision(acceptance)
    rows = [0, *(1 + node for node in acceptance.accepted_node_indices)]
    token_ids = [*(draft.token_ids[node] for node in acceptance.accepted_node_indices), acceptance.next_token_id]
    return RoundDecision(acceptance, token_logprobs(logits[rows], token_ids, round_.num_logprobs, vocabulary_size))
