"""Prompt lookup: what followed the last n tokens when they stood in the text before. No model, no torch, no tokenizer.

The longest match wins, the most recent among equally long ones; a guess that runs into the end of the text goes on with
its own tokens, so that a repetition is continued as often as it is worth. How far a guess goes is bounded by what is
likely to be accepted: that grows with the length of the match and with the acceptance measured in this session.
Source: "prompt lookup decoding" (Saxena, 2023); the same idea as LLMA (Yang et al., 2023, arXiv:2304.04487).
"""

from collections.abc import Sequence

from drafter_service.proposers.base import NO_LIMITS, NOTHING, DraftLimits, Proposal
from drafter_service.proposers.confidence import AcceptanceByConfidence
from specdec.messages import SparseDistribution
from specdec.params import AcceptanceRule, SamplingParams

NAME = "ngram"
NGRAM_SIZES = (5, 3, 2)
MAX_CANDIDATES = 32
MAX_MATCH_LENGTH = 48
MIN_REACH_PROB = 0.05
"""A token less likely to be reached and accepted than this is not worth a byte on the wire."""

# Lower edges of match lengths, and how often the token after a match of such a length was right in code and prose.
_MATCH_LENGTH_EDGES = (3.0, 4.0, 5.0, 7.0, 11.0, 21.0)
_MATCH_LENGTH_PRIORS = (0.30, 0.45, 0.55, 0.65, 0.78, 0.88, 0.95)


class NgramIndex:
    """Where each n-gram of a growing text ends. One entry for each token and each n."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    @property
    def token_ids(self) -> Sequence[int]:
        """The text."""
        return self._token_ids

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Takes the text to be these tokens. Cheap where they continue the text, a rebuild where they do not."""
        known = len(self._token_ids)
        if list(token_ids[:known]) != self._token_ids:
            self._token_ids, self._ends, known = [], {}, 0
        for position in range(known, len(token_ids)):
            self._token_ids.append(token_ids[position])
            for size in NGRAM_SIZES:
                if position >= size:  # an n-gram is indexed once its follower is known
                    key = tuple(self._token_ids[position - size : position])
                    self._ends.setdefault(key, []).append(position)

    def longest_match(self) -> tuple[int, int]:
        """(position of the follower, match length) of the longest suffix that stood before; length 0 where none did."""
        text = self._token_ids
        best_end, best_length = 0, 0
        for size in NGRAM_SIZES:
            if len(text) <= size:
                continue
            for end in reversed(self._ends.get(tuple(text[-size:]), ())[-MAX_CANDIDATES:]):
                length = self._match_length(end)
                if length > best_length:
                    best_end, best_length = end, length
            if best_length:
                break  # shorter n-grams lead to matches that end here too, or to shorter ones
        return best_end, best_length

    def _match_length(self, end: int) -> int:
        text = self._token_ids
        length = 0
        while length < MAX_MATCH_LENGTH and length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def continuation(self, end: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens from `end` on; past the end of the text it reads its own tokens."""
        text = self._token_ids
        period = len(text) - end
        return tuple(text[end + i % period] for i in range(num_tokens))


class NgramSession:
    """Lookup over the prompt and output of one session.

    A guess is certain of itself: under rejection each token's distribution is 1 for the token, which makes that rule
    the same as one_hot. Its length depends on committed tokens alone, as rejection demands.
    """

    def __init__(self, rule: AcceptanceRule) -> None:
        self._sends_probs = rule is AcceptanceRule.REJECTION
        self._index = NgramIndex()
        self._acceptance = AcceptanceByConfidence(_MATCH_LENGTH_EDGES, _MATCH_LENGTH_PRIORS, prior_weight=4, memory=24)
        self._match_lengths: list[int] = []

    def propose(self, committed_token_ids: Sequence[int], max_tokens: int, limits: DraftLimits = NO_LIMITS) -> Proposal:
        """What followed the longest match, up to where acceptance becomes unlikely. Costs no model step."""
        self._match_lengths = []
        self._index.extend_to(committed_token_ids)
        end, match_length = self._index.longest_match()
        if match_length == 0:
            return NOTHING
        reach_probs: list[float] = []
        reach_prob = 1.0
        for i in range(max_tokens):
            # Once its first i tokens are accepted, the match is i tokens longer.
            reach_prob *= self._acceptance.estimate(match_length + i)
            if reach_prob < MIN_REACH_PROB:
                break
            reach_probs.append(reach_prob)
        self._match_lengths = [match_length + i for i in range(len(reach_probs))]
        token_ids = self._index.continuation(end, len(reach_probs))
        draft_probs = tuple(SparseDistribution((token,), (1.0,)) for token in token_ids) if self._sends_probs else ()
        return Proposal(token_ids, draft_probs=draft_probs, reach_probs=tuple(reach_probs))

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Learns what matches of each length are worth in this text."""
        self._acceptance.observe_chain(self._match_lengths, num_draft_tokens, num_accepted_tokens)
        self._match_lengths = []

    def backlog(self, committed_token_ids: Sequence[int]) -> int:
        """Never any: indexing costs microseconds."""
        del committed_token_ids
        return 0

    def warm(self, committed_token_ids: Sequence[int]) -> None:
        """Indexes the tokens."""
        self._index.extend_to(committed_token_ids)

    def close(self) -> None:
        """Frees the index."""
        self._index = NgramIndex()


class NgramProposer:
    """Lookup for any target: it has no vocabulary of its own."""

    name = NAME
    tokenizer_fingerprint = ""
    vocabulary_size = 0
    context_limit = 0
    kv_bytes = 0
    model_info = None

    def new_session(
        self, params: SamplingParams, rule: AcceptanceRule, prompt_length: int, seed: int | None, sample_index: int
    ) -> NgramSession:
        """A session with an empty index."""
        del params, prompt_length, seed, sample_index
        return NgramSession(rule)

    def close(self) -> None:
        """Nothing to free."""
