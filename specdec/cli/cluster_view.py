"""How a starting cluster looks: one line for each role as it becomes ready, a note while a model downloads or loads."""

from rich.console import Console
from rich.text import Text

from specdec.cli.processes import RoleProgress, RoleState
from specdec.cli.terminal_text import printable

_NOTE_EVERY_S = 10.0
_WAITS = {"": "starting", "listening": "loading"}
"""What a role that is not ready does after its last word; other words tell it themselves."""
_LINES = {
    RoleState.READY: ("ready", "green"),
    RoleState.STOPPED: ("stopped", "dim"),
    RoleState.KILLED: ("killed: it did not stop in time", "yellow"),
}


class ClusterView:
    """Writes to stderr, so that stdout stays the command's own."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._last_note: dict[str, tuple[str, float]] = {}

    def progress(self, progress: RoleProgress) -> None:
        if progress.state is RoleState.WAITING:
            self._note(progress)
        elif progress.state in _LINES:
            word, style = _LINES[progress.state]
            after = f"after {progress.elapsed_s:.1f} s" if progress.state is RoleState.READY else ""
            self._write(progress.name, f"{word} {after} {progress.detail}".rstrip(), style)

    def log_line(self, name: str, line: str) -> None:
        """A line of a role's log; shown with verbose alone, it is in the log folder anyway."""
        if self._verbose:
            self._write(name, printable(line), "dim")

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _note(self, progress: RoleProgress) -> None:
        """When a role says something new, and now and then while it says nothing."""
        detail, at_s = self._last_note.get(progress.name, ("", -_NOTE_EVERY_S))
        if progress.detail != detail or progress.elapsed_s - at_s >= _NOTE_EVERY_S:
            self._last_note[progress.name] = (progress.detail, progress.elapsed_s)
            self._write(
                progress.name, f"{_WAITS.get(progress.detail, progress.detail)} ... {progress.elapsed_s:.0f} s", "dim"
            )

    def _write(self, name: str, text: str, style: str) -> None:
        self._console.print(Text(f"{name:<13}", style="bold"), Text(text, style=style), soft_wrap=True)
