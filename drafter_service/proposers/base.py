"""What every way of guessing looks like to the draft loop. Knows the shapes; refuses to know any proposer.

A *proposer* is loaded once and serves many sessions; a *proposer session* holds what one session needs (a cache, an
index). All methods of a session but `backlog`, and `Proposer.new_session`, are called from the one device thread.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from specdec.messages import ModelInfo, SparseDistribution
from specdec.params import AcceptanceRule, SamplingParams


@dataclasses.dataclass(frozen=True)
class DraftLimits:
    """What a draft may cost. The draft loop chooses it from measured times; the defaults limit nothing.

    Attributes:
        max_model_tokens: tokens that may be paid for with a model step. None: as many as the draft may have.
        min_reach_prob: no model step for a token that is less likely than this to be reached and accepted.
        min_tokens_gained: a free guess must promise this many accepted tokens to be preferred to the model's guess.
    """

    max_model_tokens: int | None = None
    min_reach_prob: float = 0.0
    min_tokens_gained: float = 0.0


NO_LIMITS = DraftLimits()


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A guess: a chain, or a tree where `parent_indices` are given.

    Attributes:
        token_ids: K guessed tokens.
        parent_indices: as on the wire; empty for a chain.
        draft_probs: K distributions under the rule rejection, else empty.
        reach_probs: for each token the proposer's estimate that it and all before it are accepted, never increasing.
            Empty where tokens were sampled under rejection: the length of such a draft was fixed before sampling.
        num_model_tokens: how many of the tokens cost a model step.
        num_read_tokens: committed tokens that the model had to take in before the first of those steps.
    """

    token_ids: tuple[int, ...]
    parent_indices: tuple[int, ...] = ()
    draft_probs: tuple[SparseDistribution, ...] = ()
    reach_probs: tuple[float, ...] = ()
    num_model_tokens: int = 0
    num_read_tokens: int = 0

    def truncated(self, num_tokens: int) -> "Proposal":
        """The first `num_tokens` of a chain."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            draft_probs=self.draft_probs[:num_tokens],
            reach_probs=self.reach_probs[:num_tokens],
        )


NOTHING = Proposal(())


class ProposerSession(Protocol):
    """Guesses for one session."""

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        """At most `max_tokens` tokens that may follow the committed ones; none is a good answer."""
        ...

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """What became of the last proposal: the first `num_draft_tokens` of it were judged, this many were right."""
        ...

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        """Committed tokens that `warm` would work off. 0 where the session does not want it now.

        Called on the event loop's thread while no other method of the session runs: it must be quick, and only look.
        """
        ...

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        """Brings the cache up to these tokens, so that a later proposal is quick."""
        ...

    def close(self) -> None:
        """Frees what the session holds."""
        ...


class Proposer(Protocol):
    """One way of guessing, loaded.

    Attributes:
        name: as in the registry.
        tokenizer_fingerprint: empty where the proposer has no tokenizer.
        vocabulary_size: rows of its logits, padding included; 0 where it has no model.
        context_limit: most positions it takes; 0 where it has no limit.
        kv_bytes: what the caches of its sessions hold now.
        model_info: what it has loaded; None where it has no model.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def context_limit(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def model_info(self) -> ModelInfo | None: ...

    def new_session(
        self, params: SamplingParams, rule: AcceptanceRule, prompt_length: int, seed: int | None, sample_index: int
    ) -> ProposerSession:
        """A session that has seen nothing.

        `seed` is the verifier's, under the rule coupled alone; with `sample_index` it keys the noise that both share.
        """
        ...

    def close(self) -> None:
        """Frees the model."""
        ...
