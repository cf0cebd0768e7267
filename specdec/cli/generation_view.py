"""How `specdec generate` shows a stream: as it is, coloured by origin, or not at all."""

import sys
from typing import Protocol

from rich.console import Console
from rich.text import Text

from specdec.cli.answer import Answer
from specdec.cli.draft_marks import STYLES, Origin, split_by_origin
from specdec.cli.terminal_text import printable
from specdec.messages import Delta, Finished, GenerationEvent


class GenerationView(Protocol):
    def show(self, event: GenerationEvent) -> None:
        """A frame came."""

    def close(self, answer: Answer) -> None:
        """The last frame was shown."""


class QuietView:
    """Nothing: the caller writes the answer whole."""

    def show(self, event: GenerationEvent) -> None:
        return

    def close(self, answer: Answer) -> None:
        return


class PlainView:
    """The text alone; into a pipe or file byte for byte."""

    def show(self, event: GenerationEvent) -> None:
        if isinstance(event, Delta | Finished) and event.text:
            sys.stdout.write(printable(event.text) if sys.stdout.isatty() else event.text)
            sys.stdout.flush()

    def close(self, answer: Answer) -> None:
        if sys.stdout.isatty():
            print()


class DraftView:
    """The text coloured by how each token came about, a legend and a summary after it. Colours even into a pipe, since
    they were asked for, unless NO_COLOR is set."""

    def __init__(self, *, no_color: bool) -> None:
        self._console = Console(force_terminal=not no_color, no_color=no_color, highlight=False, soft_wrap=True)
        self._counts = dict.fromkeys(Origin, 0)

    def show(self, event: GenerationEvent) -> None:
        match event:
            case Delta():
                for text, origin in split_by_origin(event):
                    self._write(text, STYLES[origin] if origin else "")
                accepted = event.round.num_accepted_tokens
                self._counts[Origin.ACCEPTED] += accepted
                if event.round.next_token_kind is not None:
                    self._counts[Origin[event.round.next_token_kind.value]] += len(event.token_ids) - accepted
            case Finished():
                self._write(event.text, "")

    def close(self, answer: Answer) -> None:
        self._console.print()
        self._console.print()
        for origin, count in self._counts.items():
            self._write(f"{origin.value}: {count}\n", STYLES[origin])
        length = answer.acceptance_length
        drafts = f"{length:.2f} tokens a drafted round, " if length is not None else "no drafts, "
        self._console.print(f"{drafts}{len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f} tokens/s")
        if answer.finished.speculative.disabled_reason:
            self._console.print(f"speculation was off: {answer.finished.speculative.disabled_reason}")

    def _write(self, text: str, style: str) -> None:
        self._console.print(Text(printable(text), style=style), end="", soft_wrap=True)
        self._console.file.flush()
