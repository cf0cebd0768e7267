"""How a fault becomes one line on stderr and an exit code: 2 for bad input, 1 for what failed, 130 for Ctrl-C.

Foreseeable faults never show a traceback; a defect of ours does.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer

from specdec.cli.role_process import RoleFailedError
from specdec.errors import SpecdecError, UnusableFileError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_BAD_INPUT_STATUSES = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"})
_SHOWN_LOG_LINES = 12


class UsageError(Exception):
    """What the user typed does not make sense. The message is for people."""


def fail(message: str, code: int = EXIT_FAILED, reason: str = "") -> NoReturn:
    """Tells and leaves."""
    print(f"error: {message}" + (f" ({reason})" if reason else ""), file=sys.stderr, flush=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """Every command's body runs in it."""
    try:
        yield
    except UsageError as error:
        fail(str(error), EXIT_BAD_INPUT)
    except SpecdecError as error:
        code = EXIT_BAD_INPUT if error.status in _BAD_INPUT_STATUSES else EXIT_FAILED
        fail(error.message, code, _reason(error))
    except RoleFailedError as error:
        for line in error.last_lines[-_SHOWN_LOG_LINES:]:
            print(f"  {error.name} | {line}", file=sys.stderr)
        fail(str(error))
    except UnusableFileError as error:
        fail(str(error), EXIT_BAD_INPUT)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        fail(f"{what}{error.strerror or error}")
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)


def _reason(error: SpecdecError) -> str:
    """Its name in the catalogue, and when to come again where the server told."""
    name = error.reason if error.reason != SpecdecError.reason else ""
    if error.retry_after_s is None:
        return name
    after = f"come again in {math.ceil(10 * error.retry_after_s) / 10} s"  # not a moment too early
    return f"{name}, {after}" if name else after
