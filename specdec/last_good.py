"""Files that are replaced while a role runs: what they held when they last made sense.

Knows when to look again and that a half-written file is no reason to end; refuses to know what the files mean.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from specdec.errors import UnusableFileError

Content = TypeVar("Content")

_log = structlog.get_logger(__name__)

_Signature = tuple[tuple[int, int, int] | None, ...]


class LastGood(Generic[Content]):
    """`current()` is what the files hold, or held before they stopped making sense. Safe to ask from any thread.

    Args:
        paths: the files that belong together.
        read: makes one content of them; raises OSError or UnusableFileError.
        what: for the log.

    Raises:
        OSError, UnusableFileError: from the constructor alone, where there is nothing good to begin with.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], what: str) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._what = what
        self._lock = threading.Lock()
        self._signature = self._look()
        self._content = read()

    def current(self) -> Content:
        """Costs a look at each file's date; reads them where one has changed."""
        with self._lock:
            signature = self._look()
            if signature != self._signature:
                self._signature = signature  # before the attempt: what is wrong now is told once
                try:
                    self._content = self._read()
                except Exception as error:  # whatever a reader failed to foresee: a role that runs goes on
                    _log.warning("files_not_usable_last_good_ones_stay", what=self._what, fault=_fault(error))
                else:
                    _log.info("files_read_again", what=self._what)
            return self._content

    def _look(self) -> _Signature:
        return tuple(_signature_of(path) for path in self._paths)


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()  # through links: Kubernetes swaps one to replace the files of a secret at once
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _fault(error: Exception) -> str:
    """Quotes nothing of the files: what is not an error of theirs may."""
    match error:
        case OSError():
            return error.strerror or "unreadable"
        case UnusableFileError():
            return str(error)
        case _:
            return type(error).__name__
