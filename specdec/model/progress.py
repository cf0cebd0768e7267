"""Long steps of a start, told to whoever watches: a bar on a terminal, plain log lines elsewhere.

Both go to standard error: standard output belongs to the answer.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

_LOG_INTERVAL_S = 5.0

log = logging.getLogger(__name__)


@contextlib.contextmanager
def download_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told the bytes done so far."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(f"downloading {what}", total=total_bytes)
            yield lambda done_bytes: progress.update(task, completed=min(done_bytes, total_bytes))
        return

    last_logged_s = started_s = time.monotonic()

    def tell(done_bytes: int) -> None:
        nonlocal last_logged_s
        if time.monotonic() - last_logged_s >= _LOG_INTERVAL_S:
            last_logged_s = time.monotonic()
            log.info("downloading %s: %d of %d MB", what, done_bytes // 10**6, total_bytes // 10**6)

    log.info("downloading %s: %d MB", what, total_bytes // 10**6)
    yield tell
    log.info("downloaded %s in %.0f s", what, time.monotonic() - started_s)


@contextlib.contextmanager
def step_progress(what: str) -> Iterator[None]:
    """Shows that a step of unknown length is running."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield
        return
    started_s = time.monotonic()
    log.info("%s", what)
    yield
    log.info("%s: done in %.0f s", what, time.monotonic() - started_s)


def silence_transformers() -> None:
    """transformers' bars and warnings would stand between the lines of the log."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
