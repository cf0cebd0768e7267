"""Which verifier is likely to have a prompt's first blocks in its cache, from what was sent where.

The orchestrator has no tokenizer: prompts are compared as text, or as the token ids that they came as. Kept are
hashes of their beginnings, never a prompt. It is a guess: a verifier may have given the blocks away since. Pure: times
are arguments.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specdec.params import ChatMessage, Prompt, prompt_token_ids

_CHARACTERS_PER_TOKEN = 4
_FIRST_CHUNK_TOKENS = 32
"""Two blocks of a verifier: what is shorter is computed anew in no time."""
_CHUNK_GROWTH = 8
"""A chunk is an eighth of what precedes it: few hashes for long prompts, told apart to an eighth of their length."""
_NAMING_CHUNK = 3
"""Prompts that are alike up to here, 128 tokens, are taken to go on alike."""
_HASH_BYTES = 8
_MAX_HOLDERS = 4
"""Verifiers that are remembered of one beginning, the latest."""


@dataclass(frozen=True)
class PromptMarks:
    """Hashes of a prompt's beginnings, shortest first, each with its length in tokens; and the whole prompt's length.

    Lengths of text are estimated.
    """

    beginnings: tuple[tuple[bytes, int], ...] = ()
    num_tokens: int = 0

    @property
    def name(self) -> str:
        """Of how the prompt begins, the same in every orchestrator; empty for a short one."""
        return self.beginnings[_NAMING_CHUNK][0].hex() if len(self.beginnings) > _NAMING_CHUNK else ""


class PrefixAffinity:
    """At most `capacity` beginnings, those that were used least recently go first."""

    def __init__(self, *, capacity: int = 32_768, lifetime_s: float = 600.0) -> None:
        self._capacity = capacity
        self._lifetime_s = lifetime_s
        self._holders: OrderedDict[bytes, dict[str, tuple[int, float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def marks(self, prompt: Prompt, tenant: str, model: str) -> PromptMarks:
        """Hashes are chained, so that a beginning's tells all of it; verifiers share blocks within one tenant alone."""
        digest = hashlib.blake2b(f"{len(tenant)}:{tenant}{model}".encode(), digest_size=_HASH_BYTES)
        token_ids = prompt_token_ids(prompt)
        if token_ids is not None:
            data, width, size = array("q", token_ids).tobytes(), 1, 8
            digest.update(b"ids")
        else:
            data, width, size = _text(prompt).encode(errors="surrogatepass"), _CHARACTERS_PER_TOKEN, 1
        beginnings, start = [], 0
        length = len(data) // size
        for end in _chunk_ends(length, _FIRST_CHUNK_TOKENS * width):
            digest.update(data[start * size : end * size])
            beginnings.append((digest.digest(), end // width))
            start = end
        return PromptMarks(tuple(beginnings), -(-length // width))

    def note(self, marks: PromptMarks, endpoint: str, incarnation: int, now: float) -> None:
        """The prompt goes to this verifier."""
        for beginning, _ in reversed(marks.beginnings):  # the shortest, which most prompts share, is forgotten last
            holders = self._holders.setdefault(beginning, {})
            holders.pop(endpoint, None)
            holders[endpoint] = (incarnation, now + self._lifetime_s)
            if len(holders) > _MAX_HOLDERS:
                del holders[next(iter(holders))]
            self._holders.move_to_end(beginning)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def cached_tokens(self, marks: PromptMarks, incarnations: Mapping[str, int], now: float) -> dict[str, int]:
        """How many of the prompt's first tokens each of these verifiers is likely to have; without those with none.

        What a verifier had before it started anew is gone.
        """
        found: dict[str, int] = {}
        for beginning, num_tokens in reversed(marks.beginnings):
            for endpoint, (incarnation, expires_at) in self._holders.get(beginning, {}).items():
                if expires_at > now and incarnations.get(endpoint) == incarnation:
                    found.setdefault(endpoint, num_tokens)
        return found


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if isinstance(turn, ChatMessage)]
    return "".join(f"\x1e{turn.role}\x1f{turn.content}" for turn in turns)


def _chunk_ends(length: int, first: int) -> Iterator[int]:
    end = first
    while end <= length:
        yield end
        end += max(first, end // _CHUNK_GROWTH)
