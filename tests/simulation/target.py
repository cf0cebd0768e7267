"""A made-up target, its undisturbed output, and a drafter that guesses it well but not always.

Logits are a hash of the token prefix (see the engine's own tests), read from the real paged cache: a wrong block, a
lost or a repeated token gives other output from there on.
"""

import functools
from collections.abc import Sequence

import torch

from drafter_service.proposers.base import NO_LIMITS, DraftLimits, Proposal
from specdec.model.runner import Rows
from specdec.params import AcceptanceRule, SamplingParams
from tests.simulation.faults import Request
from tests.unit.verifier_service.harness import (
    NUM_REAL_TOKENS,
    VOCABULARY_SIZE,
    Bench,
    HashRunner,
    LetterTokenizer,
    prefix_logits,
)

MODEL = "target"
_logits = functools.lru_cache(maxsize=200_000)(prefix_logits)


class SimRunner(HashRunner):
    """The same with logits remembered, since every schedule asks for the same ones."""

    def _session(self, rows: Rows) -> torch.Tensor:
        cache, num_rows = rows.cache, len(rows.token_ids)
        before = tuple(self._slots[cache.slot_places(0, cache.length)].tolist())
        cache.reserve(cache.length + num_rows)
        self._slots[cache.slot_places(cache.length, cache.length + num_rows)] = rows.token_ids
        cache.extend(num_rows)
        logits = [
            _logits((*before, *rows.token_ids[: row + 1]))  # chains alone are drafted here
            for row in range(rows.logits_from, num_rows)
        ]
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY_SIZE)


class SimTokenizer(LetterTokenizer):
    """Prompts are token ids already."""

    def require_short_enough(self, prompt: Sequence[int], context_limit: int) -> None: ...

    def encode_prompt(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def text(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode()


@functools.lru_cache(maxsize=4096)
def undisturbed(request: Request) -> tuple[tuple[int, ...], str]:
    """Output tokens and text of one engine alone, without drafter, owner or fault."""
    prompt, spec = request.prompt, request.spec()
    bench = Bench(runner=SimRunner(), tokenizer=SimTokenizer())
    session = bench.open(prompt, sampling=spec.sampling, stop=spec.stop)
    bench.run(session)
    return tuple(session.token_ids), session.text


class SimProposer:
    """Says what the target would say most likely, and every few positions something else."""

    name = "sim"
    tokenizer_fingerprint = "letters"
    vocabulary_size = 0
    context_limit = 0
    kv_bytes = 0
    model_info = None

    def new_session(
        self, params: SamplingParams, rule: AcceptanceRule, prompt_length: int, seed: int | None, sample_index: int
    ) -> "SimProposerSession":
        return SimProposerSession()

    def close(self) -> None: ...


class SimProposerSession:
    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        prefix = list(committed_token_ids)
        for _ in range(min(max_tokens, 4)):
            best = int(_logits(tuple(prefix))[:NUM_REAL_TOKENS].argmax())
            prefix.append(best if sum(prefix) % 4 else (best + 1) % NUM_REAL_TOKENS)
        token_ids = tuple(prefix[len(committed_token_ids) :])
        return Proposal(token_ids, reach_probs=tuple(0.8**place for place in range(1, len(token_ids) + 1)))

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None: ...

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        return 0

    def warm(self, committed_token_ids: Sequence[int]) -> None: ...

    def close(self) -> None: ...
