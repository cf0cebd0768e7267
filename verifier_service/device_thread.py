"""The one thread that owns the device: it runs commands and steps in turn, and hands events to the event loop.

Torch never blocks the loop, and the engine needs no locks. Events of a batch of commands or of a step cross in one
call.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from specdec.errors import OverloadedError
from verifier_service.mailbox import Mailbox

log = logging.getLogger(__name__)

MAX_QUEUED_COMMANDS = 16_384
IDLE_POLL_S = 1.0

T = TypeVar("T")


class DeviceThread:
    """Runs `step` for as long as there is work, and commands between steps."""

    def __init__(self, step: Callable[[], float | None], loop: asyncio.AbstractEventLoop) -> None:
        self._step = step
        self._loop = loop
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        """Queues a command. Raises OverloadedError when too many wait."""
        if self._commands.qsize() >= MAX_QUEUED_COMMANDS:
            raise OverloadedError("the verifier's command queue is full", retry_after_s=1.0)
        self._commands.put(command)

    def submit_release(self, command: Callable[[], None]) -> None:
        """Queues a command that frees something. Never turned away: there is one for each thing that was taken."""
        self._commands.put(command)

    def post(self, function: Callable[[], None]) -> None:
        """Called on the device's thread: runs the function on the event loop, after everything that was sent before."""
        self._outbox.append(function)

    def sink(self, mailbox: Mailbox[T]) -> Callable[[T], None]:
        """A function for the device's thread that puts items into a mailbox of the event loop's."""

        def send(item: T) -> None:
            self._outbox.append(lambda: mailbox.put(item))

        return send

    async def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the step that runs now. False where it did not end in time."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wake_at: float | None = 0.0
        while not self._stopping.is_set():
            self._run_commands(wake_at)
            self._flush()
            try:
                wake_at = self._step()
            except Exception:
                log.exception("step failed")
                wake_at = time.monotonic() + IDLE_POLL_S
            self._flush()

    def _run_commands(self, wake_at: float | None) -> None:
        """Runs the commands that are queued now; waits for the first one until `wake_at`.

        Not those that come meanwhile: a flood of commands must not keep the steps from running.
        """
        wait_s = IDLE_POLL_S if wake_at is None else min(IDLE_POLL_S, wake_at - time.monotonic())
        try:
            commands = [self._commands.get(block=wait_s > 0, timeout=max(wait_s, 1e-4))]
        except queue.Empty:
            return
        commands += [self._commands.get_nowait() for _ in range(self._commands.qsize())]  # nobody else takes any
        for command in commands:
            try:
                command()
            except Exception:
                log.exception("command failed")

    def _flush(self) -> None:
        if not self._outbox:
            return
        batch, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            log.warning("the event loop is closed; events are lost", extra={"num_events": len(batch)})


def _deliver(batch: list[Callable[[], None]]) -> None:
    for put in batch:
        put()
