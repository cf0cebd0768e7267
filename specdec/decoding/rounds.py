"""Decides the rounds of many sessions at once, each with parameters, a rule, a draft and a history of its own.

What is decided for a round depends on nothing else in the batch. Knows rows of logits; knows no session and no model.

Shapes: K draft tokens of a round, V logit rows of the model; R the sum of 1 + K over the rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from specdec.decoding.acceptance import Acceptance, acceptance
from specdec.decoding.device_rows import HostRows
from specdec.decoding.draft import DraftTokens
from specdec.decoding.history import TokenHistory
from specdec.decoding.logprobs import token_logprobs
from specdec.decoding.noise import Noise
from specdec.decoding.round_input import RoundInput
from specdec.decoding.rows.batch import edits, walk_rounds
from specdec.decoding.rows.records import NOTHING
from specdec.messages import PositionLogprobs, SparseDistribution
from specdec.params import AcceptanceRule, SamplingParams

__all__ = ["RoundDecision", "RoundInput", "TokenHistory", "decide_rounds", "token_logprobs", "warm_up"]

_HOST_ROWS = HostRows()


class NotANumberError(ArithmeticError):
    """Logits that are not finite: nothing can be decided from them.

    `rounds` are the places in the batch of those that cannot be decided; the others may be tried again without them.
    """

    def __init__(self, rounds: Sequence[int]) -> None:
        super().__init__(f"{len(rounds)} rounds have logits that are not finite")
        self.rounds = rounds


@dataclass(frozen=True)
class RoundDecision:
    """What is committed, and the log-probabilities of the accepted tokens and the next one, if they were asked for."""

    acceptance: Acceptance
    logprobs: Sequence[PositionLogprobs] = ()


def decide_rounds(rounds: Sequence[RoundInput], logits: Tensor, vocabulary_size: int) -> list[RoundDecision]:
    """Decides each round from its 1 + K rows of logits [R, V] float32, those of the first round first.

    Args:
        rounds: with drafts that `check_draft` admits, and params that `require_possible_token` leaves a token.
        logits: on any device. Never written to.
        vocabulary_size: ids from here on are padding and are never decided.

    Raises:
        ValueError: the rows are not those of the rounds.
        NotANumberError: logits are not finite.
    """
    ends = list(accumulate((1 + len(round_.draft.token_ids) for round_ in rounds), initial=0))
    first_rows, num_rows = ends[:-1], ends[-1]
    if len(logits) != num_rows:
        raise ValueError(f"{len(logits)} rows of logits for rounds of {num_rows}")
    if logits.is_cpu:
        walks = walk_rounds(rounds, first_rows, logits, vocabulary_size)
    else:
        walks = walk_from_device(rounds, first_rows, logits, vocabulary_size)
    if lost := [place for place, (_, next_token_id) in enumerate(walks) if next_token_id == NOTHING]:
        raise NotANumberError(lost)
    logprobs = _logprobs(rounds, first_rows, walks, logits, vocabulary_size)
    return [
        RoundDecision(acceptance(round_.draft, *walk), of_round)
        for round_, walk, of_round in zip(rounds, walks, logprobs, strict=True)
    ]


def walk_from_device(
    rounds: Sequence[RoundInput], first_rows: Sequence[int], logits: Tensor, vocabulary_size: int
) -> list[tuple[list[int], int]]:
    """`walk_rounds` of logits on a device: of a plain greedy round one id for each row travels, of others the rows."""
    walks: list[tuple[list[int], int]] = [([], NOTHING)] * len(rounds)
    plain = {place for place, round_ in enumerate(rounds) if _is_plain_greedy(round_)}
    if plain:
        best = logits[:, :vocabulary_size].max(dim=-1)  # the lowest id among equals, and NaN where a row has any
        best_token_ids = torch.where(best.values.isfinite(), best.indices, NOTHING).tolist()
        for place in plain:
            walks[place] = _walk_greedy(rounds[place].draft, best_token_ids[first_rows[place] :])
    others = [place for place in range(len(rounds)) if place not in plain]
    if others:
        ranges = [
            range(first_rows[place], first_rows[place] + 1 + len(rounds[place].draft.token_ids)) for place in others
        ]
        on_host = _HOST_ROWS.take(logits, [row for range_ in ranges for row in range_])
        starts = list(accumulate(map(len, ranges), initial=0))[:-1]
        found = walk_rounds([rounds[place] for place in others], starts, on_host, vocabulary_size)
        for place, walk in zip(others, found, strict=True):
            walks[place] = walk
    return walks


def warm_up(vocabulary_size: int) -> None:
    """Runs a round of every rule, so that the first real one is as fast as the others."""
    draft = DraftTokens((0,), None, (SparseDistribution((0,), (1.0,)),))
    rules = (AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT, AcceptanceRule.REJECTION)
    params = [SamplingParams(top_k=2, top_p=0.9, presence_penalty=0.1, acceptance_rule=rule) for rule in rules]
    history = TokenHistory((0,))
    rounds = [RoundInput(own, Noise(0), 1, draft, history, num_logprobs=1) for own in params]
    decide_rounds(rounds, torch.zeros((2 * len(rounds), vocabulary_size)), vocabulary_size)


def _is_plain_greedy(round_: RoundInput) -> bool:
    params = round_.params
    is_early = bool(round_.suppressed_token_ids) and round_.history.num_output_tokens < params.min_tokens
    return params.rule is AcceptanceRule.GREEDY and not edits(params, is_early)


def _walk_greedy(draft: DraftTokens, best_token_ids: Sequence[int]) -> tuple[list[int], int]:
    accepted_nodes: list[int] = []
    row = 0
    while True:
        best = best_token_ids[row]
        node = next((child for child in draft.children_of_row[row] if draft.token_ids[child] == best), None)
        if node is None:
            return accepted_nodes, best
        accepted_nodes.append(node)
        row = 1 + node


def _logprobs(
    rounds: Sequence[RoundInput],
    first_rows: Sequence[int],
    walks: Sequence[tuple[list[int], int]],
    logits: Tensor,
    vocabulary_size: int,
) -> list[Sequence[PositionLogprobs]]:
    """Of each round that asks for them: accepted tokens, then the next token, each from the row before it."""
    asking = [place for place, round_ in enumerate(rounds) if round_.num_logprobs is not None]
    found: list[Sequence[PositionLogprobs]] = [()] * len(rounds)
    if not asking:
        return found
    rows: list[int] = []
    token_ids: list[int] = []
    for place in asking:
        nodes, next_token_id = walks[place]
        rows += (first_rows[place], *(first_rows[place] + 1 + node for node in nodes))
        token_ids += (*(rounds[place].draft.token_ids[node] for node in nodes), next_token_id)
    most = max(rounds[place].num_logprobs or 0 for place in asking)
    positions = iter(token_logprobs(logits, token_ids, most, vocabulary_size, rows))
    for place in asking:
        wanted = rounds[place].num_logprobs
        of_round = list(islice(positions, 1 + len(walks[place][0])))
        found[place] = [PositionLogprobs(told.chosen, told.alternatives[:wanted]) for told in of_round]
    return found
