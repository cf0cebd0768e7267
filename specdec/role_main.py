"""Run a role as this process: its coroutine to the end, then an exit that nothing delays or spoils."""

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Coroutine


def run_role(role: Coroutine[None, None, None]) -> None:
    """Runs the role; where threads of native code are still at work (a load that was cut short), ends the process.

    The interpreter's own exit would abort in the middle of their work. Errors of the role pass through.
    """
    asyncio.run(role)
    gc.disable()  # what torch and transformers leave is not searched for garbage once more: it took two seconds of CPU
    gc.freeze()
    if any(thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
