"""What a session's output may be penalised for: the tokens that stand in its prompt and its output, and how often.

Kept up to date token by token, so that a round costs what is new in it, however long the output has become. Knows ids
and counts; knows no penalty and no draft.
"""

from collections import Counter
from collections.abc import Iterable


class TokenHistory:
    """The distinct tokens of a prompt and of the output so far."""

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self.prompt_token_ids = frozenset(prompt_token_ids)
        self.output_counts: Counter[int] = Counter()
        self.num_output_tokens = 0
        self.append(output_token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Tokens were committed to the output."""
        for token_id in token_ids:
            self.output_counts[token_id] += 1
            self.num_output_tokens += 1
