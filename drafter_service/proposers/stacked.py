"""Lookup where it finds a match worth more than the model's guess, else the model. Knows two other proposers, no more.

Lookup costs nothing, the model costs a step for each token: so the lookup wins when the tokens it is expected to bring
outweigh what the model would bring net of its time, which the draft loop knows (`DraftLimits.min_tokens_gained`).
While lookups win, the model's cache is left behind on purpose: keeping it warm would take time from the verifier for
guesses that nobody asks for.
"""

from collections.abc import Sequence

from drafter_service.proposers.base import NO_LIMITS, DraftLimits, Proposal, Proposer, ProposerSession
from specdec.messages import ModelInfo
from specdec.params import AcceptanceRule, SamplingParams

NAME = "stacked"
LOOKUP_SUFFICES = 1.0
"""A match that promises more accepted tokens than this needs no model, nor a warm one while the model does not pay."""


class StackedSession:
    """One session's lookup and model."""

    def __init__(self, lookup: ProposerSession, model: ProposerSession) -> None:
        self._lookup = lookup
        self._model = model
        self._last: ProposerSession | None = None
        self._model_wanted = False

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        """The lookup's guess, the model's guess, or none while the model has to catch up first."""
        found = self._lookup.propose(committed_token_ids, max_tokens, limits)
        # Compared over as many tokens as the model would guess: the tail of a long match costs the verifier rows.
        expected = sum(found.reach_probs[: limits.max_model_tokens or None])
        model_pays = limits.max_model_tokens is None or limits.max_model_tokens > 0
        self._model_wanted = expected <= max(limits.min_tokens_gained, 0.0 if model_pays else LOOKUP_SUFFICES)
        if self._model_wanted and model_pays:
            guessed = self._model.propose(committed_token_ids, max_tokens, limits)
            if guessed.token_ids:
                self._last = self._model
                return guessed
        self._last = self._lookup
        return found

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Tells the one whose guess it was."""
        if self._last is not None:
            self._last.observe(num_draft_tokens, num_accepted_tokens)

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        """The model's, while the lookup does not suffice."""
        return self._model.backlog(committed_token_ids) if self._model_wanted else 0

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        """Brings the model's cache up; the lookup needs no warming."""
        self._model.warm(committed_token_ids)

    def close(self) -> None:
        """Closes both."""
        self._lookup.close()
        self._model.close()


class StackedProposer:
    """Two loaded proposers as one; to the verifier it is the model."""

    name = NAME

    def __init__(self, lookup: Proposer, model: Proposer) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._model.tokenizer_fingerprint

    @property
    def vocabulary_size(self) -> int:
        return self._model.vocabulary_size

    @property
    def context_limit(self) -> int:
        return self._model.context_limit

    @property
    def kv_bytes(self) -> int:
        return self._model.kv_bytes

    @property
    def model_info(self) -> ModelInfo | None:
        return self._model.model_info

    def new_session(
        self, params: SamplingParams, rule: AcceptanceRule, prompt_length: int, seed: int | None, sample_index: int
    ) -> StackedSession:
        """A session of each."""
        return StackedSession(
            self._lookup.new_session(params, rule, prompt_length, seed, sample_index),
            self._model.new_session(params, rule, prompt_length, seed, sample_index),
        )

    def close(self) -> None:
        """Closes both."""
        self._lookup.close()
        self._model.close()
