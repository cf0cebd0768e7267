"""Output as text, token by token: what is certain now, and whether a stop string ended it.

Knows bytes and characters; refuses to know models, sessions and end-of-sequence tokens. Held back are an unfinished
UTF-8 character and the longest end of the text that a stop string may still begin with, no longer than needed.
"""

import codecs
import dataclasses
from collections.abc import Sequence

from specdec.model.tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True)
class TextStep:
    """What a push made certain.

    `text` ends before a stop string. `num_tokens_used` counts tokens up to and including the one that completes a stop
    string, all if none does.
    """

    text: str
    num_tokens_used: int
    stopped: bool


class _StopString:
    """Knuth, Morris and Pratt's matcher: how much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = [0]  # [n]: longest proper prefix that is also an end of the first n + 1 characters
        for character in stop[1:]:
            self._shorter.append(self._longest_match(self._shorter[-1], character))

    def _longest_match(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + 1 if self.stop[num_matched] == character else 0

    def feed(self, character: str) -> bool:
        """Takes the text's next character; true when it completes the stop string, after which no more is fed."""
        self.num_matched = self._longest_match(self.num_matched, character)
        return self.num_matched == len(self.stop)


class OutputText:
    """The text of one output, as it continues its prompt.

    The output stops at the first character that completes any stop string; where that character completes several, the
    text ends before the longest. Cost is linear in the text and in the number of stop strings.
    """

    def __init__(self, tokenizer: TextTokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._pieces = tokenizer.pieces
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopString(stop) for stop in dict.fromkeys(stop_strings)]
        self._held_back = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Adds tokens. Once stopped, uses none."""
        texts: list[str] = []
        for num_tokens_used, token_id in enumerate(token_ids):
            if self._stopped:
                return TextStep("".join(texts), num_tokens_used, stopped=True)
            texts.append(self._add(self._characters.decode(self._pieces[token_id])))
        return TextStep("".join(texts), len(token_ids), self._stopped)

    def flush(self) -> str:
        """The text held back, for an output that ends here. An unfinished character becomes U+FFFD."""
        if self._stopped:
            return ""
        text = self._add(self._characters.decode(b"", final=True)) + self._held_back
        self._held_back = ""
        self._stopped = True
        return text

    def _add(self, characters: str) -> str:
        """Returns what is certain of the text held back and these characters."""
        if not self._stops:
            return characters
        for num_read, character in enumerate(characters, start=1):
            completed = [len(stop.stop) for stop in self._stops if stop.feed(character)]
            if completed:
                text = self._held_back + characters[:num_read]
                self._held_back = ""
                self._stopped = True
                return text[: len(text) - max(completed)]
        text = self._held_back + characters
        num_certain = len(text) - max(stop.num_matched for stop in self._stops)
        self._held_back = text[num_certain:]
        return text[:num_certain]
