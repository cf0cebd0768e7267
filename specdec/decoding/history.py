"""What a session's output may be penalised for: the tokens that stand in its prompt and its output, and how often.

Counted token by token, so that a round costs what is new in it, however long the output has become; and not before
somebody asks, since few requests penalise anything. Knows ids and counts; knows no penalty and no draft.

Shapes: S distinct tokens.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 256


class TokenHistory:
    """The distinct tokens of a prompt and of the output so far."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()) -> None:
        self._uncounted_prompt = prompt_token_ids
        self._uncounted_output = list(output_token_ids)
        self._num_output_tokens = len(output_token_ids)
        self._places: dict[int, int] = {}
        self._token_ids = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._counts = np.zeros(_FIRST_CAPACITY, dtype=np.int32)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output so far."""
        return self._num_output_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed to the output."""
        self._uncounted_output += token_ids
        self._num_output_tokens += len(token_ids)

    def seen(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Distinct token ids [S] of prompt and output, and how often the output holds each [S].

        Views that the next `append` may make stale.
        """
        self._count()
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)]

    def count(self, token_id: int) -> int:
        """How often the output holds the token."""
        self._count()
        place = self._places.get(token_id)
        return 0 if place is None else int(self._counts[place])

    def _count(self) -> None:
        for token_id in dict.fromkeys(self._uncounted_prompt):
            self._place(token_id)
        for token_id, count in Counter(self._uncounted_output).items():
            place = self._place(token_id)  # first: it may make room
            self._counts[place] += count
        self._uncounted_prompt = ()
        self._uncounted_output.clear()

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[place] = token_id
        return place
