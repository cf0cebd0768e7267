"""How `specdec generate` shows a stream: as it is, coloured by origin, with log-probabilities, or not at all."""

import itertools
import sys
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.text import Text

from specdec.cli.answer import Answer
from specdec.cli.draft_marks import STYLES, Origin, split_by_origin
from specdec.cli.terminal_text import printable
from specdec.messages import Delta, Finished, GenerationEvent, PositionLogprobs, Started

_WHY_OFF = {
    "REQUESTED": "the request said so",
    "DOES_NOT_PAY": "drafts do not pay at this load, or it was not known yet whether they do",
}


class GenerationView(Protocol):
    def show(self, event: GenerationEvent) -> None:
        """A frame came."""

    def close(self, answer: Answer) -> None:
        """The last frame of an output was shown."""


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
        if reason := answer.finished.speculative.disabled_reason:
            self._console.print(f"speculation was off: {_WHY_OFF.get(reason, reason)}")
        if num_failovers := answer.finished.num_failovers:
            times = "once" if num_failovers == 1 else f"{num_failovers} times"
            self._console.print(f"went on at another verifier {times}")
        if answer.finished.numerics_changed:
            self._console.print("verifiers of different numerics decided it: one alone might have said otherwise")

    def _write(self, text: str, style: str) -> None:
        self._console.print(Text(printable(text), style=style), end="", soft_wrap=True)
        self._console.file.flush()


class LogprobsView:
    """The text as another view shows it, and a line for each token after it: natural logarithm of its probability under
    the target, token id, text, and the most likely tokens in its place."""

    def __init__(self, text: GenerationView) -> None:
        self._text = text
        self._token_texts: list[str] = []

    def show(self, event: GenerationEvent) -> None:
        self._text.show(event)
        if isinstance(event, Delta):
            self._token_texts += event.token_texts

    def close(self, answer: Answer) -> None:
        self._text.close(answer)
        first_of_output = answer.started.num_prompt_tokens
        if not sys.stdout.isatty():
            print()
        if answer.prompt_logprobs:
            print("log-probabilities of the prompt:")
        for position, logprobs in enumerate(answer.prompt_logprobs, start=1):
            print(_logprobs_line(position, logprobs, ""))
        if answer.logprobs:
            print("log-probabilities of the output:")
        texts = itertools.chain(self._token_texts, itertools.repeat(""))
        for position, (logprobs, text) in enumerate(zip(answer.logprobs, texts, strict=False), start=first_of_output):
            print(_logprobs_line(position, logprobs, repr(text)))


def _logprobs_line(position: int, logprobs: PositionLogprobs, text: str) -> str:
    chosen = logprobs.chosen
    others = "  ".join(f"{token.token_id} {token.logprob:.4f}" for token in logprobs.alternatives)
    return f"{position:6} {chosen.logprob:10.4f}  {chosen.token_id} {text}".rstrip() + (
        f"  [{others}]" if others else ""
    )


class SamplesView:
    """Samples in order, each with a headline: the first as it comes, the next from where it stands by then."""

    def __init__(self, num_samples: int, view_of_one: Callable[[], GenerationView]) -> None:
        self._views = [view_of_one() for _ in range(num_samples)]
        self._waiting: list[list[GenerationEvent | Answer]] = [[] for _ in self._views]
        self._shown = 0
        self._has_headline = False

    def show(self, event: GenerationEvent) -> None:
        self._show_in_turn(event.sample_index if isinstance(event, Delta | Finished) else 0, event)

    def close(self, answer: Answer) -> None:
        self._show_in_turn(answer.finished.sample_index, answer)

    def _show_in_turn(self, sample_index: int, news: GenerationEvent | Answer) -> None:
        self._waiting[sample_index].append(news)
        while self._shown < len(self._views) and self._waiting[self._shown]:
            waiting, self._waiting[self._shown] = self._waiting[self._shown], []
            for each in waiting:
                self._show(self._views[self._shown], each)

    def _show(self, view: GenerationView, news: GenerationEvent | Answer) -> None:
        if not self._has_headline and not isinstance(news, Started):
            print(f"--- sample {self._shown} ---", flush=True)
            self._has_headline = True
        if not isinstance(news, Answer):
            view.show(news)
            return
        view.close(news)
        if not sys.stdout.isatty():
            print(flush=True)
        self._shown += 1
        self._has_headline = False
