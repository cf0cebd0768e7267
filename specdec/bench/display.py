"""What a person sees of a benchmark: a bar on a terminal, a line for each prompt elsewhere, a table at the end."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specdec.bench import figures
from specdec.bench.plan import BenchPrompt
from specdec.bench.records import PromptRecord


class BenchView:
    """Progress goes to stderr, so that stdout holds the table alone."""

    def __init__(self, num_prompts: int, num_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._num_prompts = num_prompts
        self._num_done = 0
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_prompts * num_steps)
        self._began = False

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, prompt: BenchPrompt, step: str) -> None:
        """Before each generation."""
        self._progress.update(
            self._task, advance=1 if self._began else 0, description=f"{prompt.category} {prompt.prompt_id}: {step}"
        )
        self._began = True

    def prompt(self, record: PromptRecord) -> None:
        """After a prompt's last generation."""
        self._num_done += 1
        if self._num_done == self._num_prompts:
            self._progress.update(self._task, advance=1, description="")
        if not self._console.is_terminal:
            self._console.print(f"{self._num_done}/{self._num_prompts} {describe_prompt(record)}", soft_wrap=True)


def describe_prompt(record: PromptRecord) -> str:
    """One line: tokens/s of everything measured, and whether any output differs."""
    parts = []
    if record.target_only is not None:
        parts.append(f"target_only {figures.tokens_per_s(record.target_only):.2f}")
    for label, generation in record.speculative.items():
        differs = record.target_only is not None and generation.token_ids != record.target_only.token_ids
        parts.append(f"{label} {figures.tokens_per_s(generation):.2f}{' DIFFERS' if differs else ''}")
    parts += [f"{mode} {len(peer.token_ids) / peer.elapsed_s:.2f}" for mode, peer in record.peers.items()]
    return f"{record.prompt.category} {record.prompt.prompt_id}: {', '.join(parts)} tokens/s"


def results_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One row per run of a report."""
    table = Table()
    for heading in ("run", "category", "prompts", "differ", "off tok/s", "on tok/s", "speed-up", "accepted", "length"):
        table.add_column(heading, justify="left" if heading in ("run", "category") else "right")
    table.add_column("round ms", justify="right")
    table.add_column("beside forward ms", justify="right")
    for run in runs:
        table.add_row(
            run["label"],
            run["category"],
            str(run["prompts"]),
            str(run["mismatching_prompts"]),
            *(
                _number(value)
                for value in (
                    run["target_only_tokens_per_s"],
                    run["speculative_tokens_per_s"],
                    run["speedup"],
                    run["acceptance_rate"],
                    run["acceptance_length"],
                    run["round_ms"]["total"],
                    run["round_ms"]["beside_forward"],
                )
            ),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
