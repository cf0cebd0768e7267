"""Many short outputs of the code under test, with drafts of every kind, to be held against the exact law."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from specdec.decoding.acceptance import Acceptance, accept
from specdec.decoding.draft import DraftTokens
from specdec.decoding.noise import Noise
from specdec.decoding.processing import process_logits
from specdec.messages import SparseDistribution
from specdec.params import AcceptanceRule, SamplingParams
from tests.statistical.exact_law import ToyTarget, draw_from

Propose = Callable[[Sequence[int], Random], DraftTokens]
"""A draft after committed tokens, with the drafter's own randomness, which is never the verifier's noise."""

Accept = Callable[[AcceptanceRule, Tensor, DraftTokens, Noise, int], Acceptance]


@dataclass
class Verifier:
    """Scores of drafts, remembered: toy contexts come back thousands of times."""

    target: ToyTarget
    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    end_ids: frozenset[int] = frozenset()
    with_draft_history: bool = True
    _rounds: dict[object, Tensor] = field(default_factory=dict)
    _rows: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def scores(self, committed: Sequence[int], draft: DraftTokens) -> Tensor:
        """[1 + K, V]; rows that are not known yet are computed in one call, as a verifier does."""
        key = (tuple(committed), tuple(draft.token_ids), tuple(draft.parents))
        if key not in self._rounds:
            paths = [(), *(tuple(draft.path_to(node)) for node in range(len(draft.token_ids)))]
            prefixes = [(*committed, *path) for path in paths]
            new = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in self._rows]
            if new:
                self._rows.update(zip(new, self._process(new, len(committed)), strict=True))
            self._rounds[key] = torch.stack([self._rows[prefix] for prefix in prefixes])
        return self._rounds[key]

    def _process(self, prefixes: Sequence[tuple[int, ...]], committed_length: int) -> Tensor:
        history_end = None if self.with_draft_history else committed_length
        return process_logits(
            self.target(prefixes),
            self.params,
            prompt_token_ids=self.prompt,
            output_token_ids_per_row=[prefix[len(self.prompt) : history_end] for prefix in prefixes],
            suppressed_token_ids=self.end_ids,
            vocabulary_size=self.target.vocabulary_size,
        )


def sample_outputs(
    verifier: Verifier,
    propose: Propose,
    *,
    num_tokens: int,
    num_trials: int,
    accept: Accept = accept,
    first_seed: int = 0,
) -> Counter[tuple[int, ...]]:
    """Outputs of `num_tokens` tokens, each with its own seed; an end-of-sequence token does not end them."""
    outputs: Counter[tuple[int, ...]] = Counter()
    random = Random(9000 + first_seed)
    for seed in range(first_seed, first_seed + num_trials):
        outputs[decode(verifier, propose, Noise(seed), random, num_tokens, accept)] += 1
    return outputs


def decode(
    verifier: Verifier,
    propose: Propose,
    noise: Noise,
    random: Random,
    num_tokens: int,
    accept: Accept = accept,
) -> tuple[int, ...]:
    """One output of `num_tokens` tokens, round by round."""
    committed = list(verifier.prompt)
    length = len(committed) + num_tokens
    while len(committed) < length:
        draft = propose(committed, random)
        scores = verifier.scores(committed, draft)
        acceptance = accept(verifier.params.rule, scores, draft, noise, len(committed))
        committed += [draft.token_ids[node] for node in acceptance.accepted_node_indices]
        committed.append(acceptance.next_token_id)
    return tuple(committed[len(verifier.prompt) : length])


# --- Proposers -------------------------------------------------------------------------------------------------------


def nothing(committed: Sequence[int], random: Random) -> DraftTokens:
    return DraftTokens()


def sampled_chain(drafter: ToyTarget, num_tokens: int, *, temperature: float = 1.0, full: bool = False) -> Propose:
    """A draft model that samples honestly and says what from: sparse with its 3 best renormalised, or the whole."""
    probs_after = _drafter_probs(drafter, temperature, None if full else 3)

    def propose(committed: Sequence[int], random: Random) -> DraftTokens:
        token_ids: list[int] = []
        distributions: list[SparseDistribution] = []
        for _ in range(num_tokens):
            probs = probs_after([*committed, *token_ids])
            token_ids.append(draw_from(probs, random.random))
            distributions.append(_distribution(probs, full))
        return DraftTokens(token_ids, None, distributions)

    return propose


def sampled_tree(drafter: ToyTarget, widths: Sequence[int], *, with_replacement: bool) -> Propose:
    """A tree of fixed shape: `widths[d]` children of every node at depth d, sampled from the draft model.

    Without replacement each later sibling's distribution lacks the earlier ones and is renormalised, as it is sent.
    """
    probs_after = _drafter_probs(drafter, 1.0, None)

    def propose(committed: Sequence[int], random: Random) -> DraftTokens:
        token_ids: list[int] = []
        parents: list[int] = []
        distributions: list[SparseDistribution] = []
        level: list[tuple[int, list[int]]] = [(-1, list(committed))]
        for width in widths:
            next_level = []
            for parent, prefix in level:
                probs = list(probs_after(prefix))
                for _ in range(width):
                    token_id = draw_from(probs, random.random)
                    next_level.append((len(token_ids), [*prefix, token_id]))
                    token_ids.append(token_id)
                    parents.append(parent)
                    distributions.append(_distribution(probs, full=False))
                    if not with_replacement:
                        probs[token_id] = 0.0
                        probs = [prob / sum(probs) for prob in probs]
            level = next_level
        return DraftTokens(token_ids, parents, distributions)

    return propose


def without_probs(propose: Propose) -> Propose:
    """The same tokens with nothing said about them, as `greedy`, `coupled` and `one_hot` want them."""

    def propose_tokens(committed: Sequence[int], random: Random) -> DraftTokens:
        draft = propose(committed, random)
        return DraftTokens(draft.token_ids, draft.parent_indices)

    return propose_tokens


def least_likely_chain(target: ToyTarget, num_tokens: int) -> Propose:
    """Adversarially wrong: always what the target likes least, said to be certain."""

    def propose(committed: Sequence[int], random: Random) -> DraftTokens:
        token_ids: list[int] = []
        for _ in range(num_tokens):
            logits = target.logits([*committed, *token_ids])[: target.vocabulary_size]
            token_ids.append(int(logits.argmin()))
        return DraftTokens(token_ids, None, [SparseDistribution([token_id], [1.0]) for token_id in token_ids])

    return propose


def fixed(*token_ids: int, parents: Sequence[int] | None = None) -> Propose:
    """The same tokens whatever was committed, said to be certain."""
    distributions = [SparseDistribution([token_id], [1.0]) for token_id in token_ids]
    return lambda committed, random: DraftTokens(token_ids, parents, distributions)


def _drafter_probs(
    drafter: ToyTarget, temperature: float, top_k: int | None
) -> Callable[[Sequence[int]], Sequence[float]]:
    """The draft model's probabilities, float32 as on the wire, by prefix; padding has none."""
    known: dict[tuple[int, ...], list[float]] = {}

    def probs_after(prefix: Sequence[int]) -> list[float]:
        key = (*prefix[-2:], len(prefix))
        if key not in known:
            logits = drafter.logits(prefix)[: drafter.vocabulary_size] / temperature
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            known[key] = torch.softmax(logits, -1).tolist()
        return known[key]

    return probs_after


def _distribution(probs: Sequence[float], full: bool) -> SparseDistribution:
    if full:
        return SparseDistribution([], list(probs))
    token_ids = [token_id for token_id, prob in enumerate(probs) if prob > 0]
    return SparseDistribution(token_ids, [probs[token_id] for token_id in token_ids])
