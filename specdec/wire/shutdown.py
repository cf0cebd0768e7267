"""SIGTERM and SIGINT as an event that a role waits for."""

import asyncio
import signal


def shutdown_signal() -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT. Called once, on the running loop of the main thread."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
