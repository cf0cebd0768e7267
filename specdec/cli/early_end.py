"""A role that is told to end while Python still imports what it needs: it ends by itself, since nothing has begun.

Standard library only: it is called before anything else is imported. A role that serves waits for the signals itself.
"""

import os
import signal
from collections.abc import Sequence
from types import FrameType

ROLES = ("verifier", "drafter", "orchestrator")


def end_in_order_while_importing(arguments: Sequence[str]) -> None:
    """From here on SIGTERM and SIGINT end the process with exit code 0, where its arguments begin with a role."""
    if arguments and arguments[0] in ROLES:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # an exception could be caught by whatever is being imported
