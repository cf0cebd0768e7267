"""A smaller model of the target's family guesses, with a key-value cache of its own.

Chain drafts, one row at a time. How a token is guessed depends on the acceptance rule:

- greedy, one_hot: the most likely token, which is the one that both rules accept most often;
- coupled: `argmax(log draft_probs + gumbel)` with the verifier's noise, so that it guesses the sample, not the mode;
- rejection: a sample, by a seed of the drafter's own, from the renormalised top-k whose probabilities are sent.

Except under rejection a draft stops early where the running product of its confidence says that a further step would
not be worth its time. Knows the model room and the decoding room; refuses to know verifiers, sessions' ids and clocks.
"""

# V vocabulary

import dataclasses
import secrets
from collections.abc import Sequence

import numpy as np
import torch

from drafter_service.proposers.base import NO_LIMITS, NOTHING, DraftLimits, Proposal
from drafter_service.proposers.confidence import AcceptanceByConfidence
from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.decoding.processing import process_with_histories
from specdec.ids import common_prefix_length
from specdec.messages import ModelInfo, SparseDistribution
from specdec.model.loading import LoadedModel
from specdec.model.runner import Rows
from specdec.params import AcceptanceRule, SamplingParams

NAME = "draft_model"
MAX_CATCH_UP_TOKENS = 48
"""A proposal that would first have to feed more than this is not made: the verifier would wait for it."""
MAX_CHUNK_TOKENS = 256
NUM_COUPLED_CANDIDATES = 512
"""Tokens less likely than these all but never win against the noise; the verifier's own choice covers all."""
NUM_REJECTION_CANDIDATES = 64

_CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 0.995)
_CONFIDENCE_PRIORS = (0.2, 0.35, 0.5, 0.65, 0.78, 0.87, 0.94, 0.98)


class DraftModelSession:
    """One session's guesses and cache."""

    def __init__(
        self,
        proposer: "DraftModelProposer",
        params: SamplingParams,
        rule: AcceptanceRule,
        prompt_length: int,
        seed: int,
        sample_index: int,
    ) -> None:
        self._proposer = proposer
        self._params = params
        self._rule = rule
        self._prompt_length = prompt_length
        self._noise = Noise(seed, sample_index)
        self._generator = np.random.default_rng(seed)
        self._cache = proposer.model.runner.new_cache()
        self._cached_token_ids: list[int] = []
        self._confidences: list[float] = []

    @property
    def cached_length(self) -> int:
        """Positions whose keys and values are in the cache."""
        return len(self._cached_token_ids)

    @property
    def kv_bytes(self) -> int:
        """Size of the cache."""
        return self._cache.num_bytes

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        """A chain. Nothing at the context limit, while the cache is too far behind, or where it finds no room; nothing
        from where this model sees no possible token."""
        self._confidences = []
        room = self._proposer.context_limit - len(committed_token_ids)
        num_tokens = min(max_tokens, room)
        if limits.max_model_tokens is not None:
            num_tokens = min(num_tokens, limits.max_model_tokens)
        num_behind = self._num_behind(committed_token_ids)
        if num_tokens <= 0 or num_behind > MAX_CATCH_UP_TOKENS:
            return NOTHING
        if not self._has_room(len(committed_token_ids) + num_tokens):
            return NOTHING
        logits = self._feed_committed(committed_token_ids)  # [V]
        if self._rule is AcceptanceRule.REJECTION:
            proposal = self._sample_chain(logits, committed_token_ids, num_tokens)
        else:
            proposal = self._guess_chain(logits, committed_token_ids, num_tokens, limits.min_reach_prob)
        return dataclasses.replace(proposal, num_read_tokens=num_behind)

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Learns what this model's confidence is worth, for all sessions under this rule."""
        self._proposer.acceptance(self._rule).observe_chain(self._confidences, num_draft_tokens, num_accepted_tokens)
        self._confidences = []

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        """Committed tokens, the last excepted, that are not in the cache. 0 where they do not fit: beyond the context
        limit, or while other sessions take the memory."""
        if len(committed_token_ids) > self._proposer.context_limit or not self._has_room(len(committed_token_ids)):
            return 0
        return self._num_behind(committed_token_ids)

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        """Feeds all of these tokens but the last, where there is room for them."""
        limit = min(len(committed_token_ids), self._proposer.context_limit) - 1
        if not self._has_room(limit):
            return
        self._rollback(committed_token_ids)
        if self.cached_length < limit:
            self._feed(committed_token_ids[self.cached_length : limit])

    def close(self) -> None:
        """Frees the cache."""
        self._cache.free()
        self._proposer.forget(self)

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the cache can grow to this many positions now."""
        return self._cache.num_blocks_wanted(num_tokens) <= self._proposer.model.runner.pool.num_free_blocks

    def _num_behind(self, committed_token_ids: Sequence[int]) -> int:
        kept = common_prefix_length(self._cached_token_ids, committed_token_ids)
        return max(0, len(committed_token_ids) - 1 - kept)

    def _rollback(self, committed_token_ids: Sequence[int]) -> None:
        # What may stay is the common prefix with the committed tokens, without the last of them: its logits are needed.
        kept = common_prefix_length(self._cached_token_ids, committed_token_ids)
        length = min(kept, len(committed_token_ids) - 1)
        if length < self.cached_length:
            self._cache.rollback(length)
            del self._cached_token_ids[length:]

    def _feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Appends the tokens, at least one, to the cache; returns the logits after the last one, [V] float32."""
        runner = self._proposer.model.runner
        chunk_tokens = min(MAX_CHUNK_TOKENS, runner.max_rows)
        for start in range(0, len(token_ids), chunk_tokens):
            chunk = list(token_ids[start : start + chunk_tokens])
            logits = runner.forward([Rows(self._cache, chunk, logits_from=len(chunk) - 1)])[0]  # [1, V]
            self._cached_token_ids.extend(chunk)
        return logits[0]

    def _feed_committed(self, committed_token_ids: Sequence[int]) -> torch.Tensor:
        self._rollback(committed_token_ids)
        return self._feed(committed_token_ids[self.cached_length :])

    def _history(self, committed_token_ids: Sequence[int]) -> TokenHistory:
        """To be appended to, since to count a long output takes longer than a guess."""
        return TokenHistory(committed_token_ids[: self._prompt_length], committed_token_ids[self._prompt_length :])

    def _scores(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        """The request's parameters applied, [V] float32 on the CPU, -inf where impossible."""
        tokenizer = self._proposer.model.tokenizer
        scores = process_with_histories(
            logits[None], self._params, [history], tokenizer.end_token_ids, tokenizer.vocabulary_size
        )
        return scores[0].float().cpu()

    def _guess_chain(
        self, logits: torch.Tensor, committed_token_ids: Sequence[int], num_tokens: int, min_reach_prob: float
    ) -> Proposal:
        acceptance = self._proposer.acceptance(self._rule)
        history = self._history(committed_token_ids)
        draft_token_ids: list[int] = []
        reach_probs: list[float] = []
        reach_prob = 1.0
        while True:
            scores = self._scores(logits, history)
            if not _is_any_possible(scores):
                break
            token_id, confidence = self._guess(scores, len(committed_token_ids) + len(draft_token_ids))
            draft_token_ids.append(token_id)
            history.append([token_id])
            self._confidences.append(confidence)
            reach_prob *= acceptance.estimate(confidence)
            reach_probs.append(reach_prob)
            # The next step's token can at most be reached as often as this one.
            if len(draft_token_ids) == num_tokens or reach_prob < min_reach_prob:
                break
            logits = self._feed([token_id])
        return Proposal(tuple(draft_token_ids), reach_probs=tuple(reach_probs), num_model_tokens=len(draft_token_ids))

    def _guess(self, scores: torch.Tensor, position: int) -> tuple[int, float]:
        """The guess for one position and how sure it is: its share among all, the noise counted in under coupled."""
        if self._rule is not AcceptanceRule.COUPLED:
            best_score, token_id = scores.max(dim=-1)
            return int(token_id), float(torch.exp(best_score - scores.logsumexp(dim=-1)))
        candidates = scores.topk(min(NUM_COUPLED_CANDIDATES, scores.shape[-1]))
        possible = candidates.values > -torch.inf
        token_ids = candidates.indices[possible]
        gumbel = self._noise.gumbel(position, token_ids, self._proposer.vocabulary_size)
        perturbed = candidates.values[possible].double() + gumbel
        best, index = perturbed.max(dim=-1)
        return int(token_ids[index]), float(torch.exp(best - perturbed.logsumexp(dim=-1)))

    def _sample_chain(self, logits: torch.Tensor, committed_token_ids: Sequence[int], num_tokens: int) -> Proposal:
        history = self._history(committed_token_ids)
        draft_token_ids: list[int] = []
        draft_probs: list[SparseDistribution] = []
        while True:
            scores = self._scores(logits, history)
            if not _is_any_possible(scores):
                break
            token_id, distribution = self._sample(scores)
            draft_token_ids.append(token_id)
            history.append([token_id])
            draft_probs.append(distribution)
            if len(draft_token_ids) == num_tokens:
                break
            logits = self._feed([token_id])
        return Proposal(tuple(draft_token_ids), draft_probs=tuple(draft_probs), num_model_tokens=len(draft_token_ids))

    def _sample(self, scores: torch.Tensor) -> tuple[int, SparseDistribution]:
        """A token and the very distribution that it was drawn from: the float32 numbers that travel, nothing finer."""
        candidates = scores.topk(min(NUM_REJECTION_CANDIDATES, scores.shape[-1]))
        probs = torch.softmax(candidates.values, dim=-1)
        possible = probs > 0
        token_ids, probs = candidates.indices[possible].tolist(), probs[possible]
        cumulative = np.cumsum(probs.double().numpy())
        drawn = self._generator.random() * cumulative[-1]
        index = min(int(np.searchsorted(cumulative, drawn, side="right")), len(token_ids) - 1)
        return token_ids[index], SparseDistribution(tuple(token_ids), tuple(probs.tolist()))


def _is_any_possible(scores: torch.Tensor) -> bool:
    """Not where a request allows what ends an output and nothing else, before min_tokens; nor among NaNs."""
    return bool(scores.max().isfinite())


class DraftModelProposer:
    """A loaded draft model.

    Args:
        model: tokenizer, runner and description, as `specdec.model.loading.load_model` gives them.
    """

    name = NAME

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._sessions: set[DraftModelSession] = set()
        self._acceptance: dict[AcceptanceRule, AcceptanceByConfidence] = {}

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.model.tokenizer.fingerprint

    @property
    def vocabulary_size(self) -> int:
        return self.model.runner.vocabulary_size

    @property
    def context_limit(self) -> int:
        return self.model.runner.context_limit

    @property
    def kv_bytes(self) -> int:
        return sum(session.kv_bytes for session in tuple(self._sessions))

    @property
    def model_info(self) -> ModelInfo | None:
        return self.model.info

    def new_session(
        self, params: SamplingParams, rule: AcceptanceRule, prompt_length: int, seed: int | None, sample_index: int
    ) -> DraftModelSession:
        """A session with an empty cache. Under rejection, and wherever the verifier gives no seed, it takes its own."""
        if seed is None or rule is not AcceptanceRule.COUPLED:
            seed = secrets.randbits(63)
        session = DraftModelSession(self, params, rule, prompt_length, seed, sample_index)
        self._sessions.add(session)
        return session

    def acceptance(self, rule: AcceptanceRule) -> AcceptanceByConfidence:
        """What this model's confidence is worth under a rule, over all sessions."""
        if rule not in self._acceptance:
            self._acceptance[rule] = AcceptanceByConfidence(
                _CONFIDENCE_EDGES, _CONFIDENCE_PRIORS, prior_weight=8, memory=400
            )
        return self._acceptance[rule]

    def forget(self, session: DraftModelSession) -> None:
        """A session was closed."""
        self._sessions.discard(session)

    def close(self) -> None:
        """Closes every session."""
        for session in tuple(self._sessions):
            session.close()
