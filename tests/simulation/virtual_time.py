"""An event loop whose time jumps to the next timer when nothing is ready, and the processes that live in it.

Every callback belongs to the process in whose context it was scheduled, or to none (the network, the clients' world). A
paused process runs nothing: what became ready for it is parked, as SIGSTOP would; a killed one stays parked for good.
"""

import asyncio
import contextvars
import dataclasses
import heapq
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

WALL_CLOCK_BEGIN_S = 1_700_000_000.0
NOBODY = contextvars.Context()
"""The context of what belongs to no process."""

_process: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


class DeadlockError(Exception):
    """Nothing is ready and no timer runs: whoever waits would wait for ever."""


@dataclasses.dataclass(eq=False)
class Process:
    """One process. `errors` is told what nobody else would hear of."""

    name: str
    loop: "VirtualLoop"
    wall_clock_offset_s: float = 0.0
    is_paused: bool = False
    is_dead: bool = False
    parked: deque[events.Handle] = dataclasses.field(default_factory=deque)
    tasks: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)

    def context(self) -> contextvars.Context:
        context = contextvars.Context()
        context.run(_process.set, self)
        return context

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """A task of this process, whoever asks for it."""
        return self.loop.create_task(coroutine, name=name or self.name, context=self.context())

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        self.loop.release(self.parked)

    def kill(self) -> None:
        """Nothing of it runs any more, not even what cleans up."""
        self.is_dead = True


def running_world() -> Any:
    """The world of the loop that runs now."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("only within a simulation")
    return loop.world


def current_process() -> Process | None:
    return _process.get(None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Deterministic: callbacks run in the order in which they became ready, time moves only where nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.num_callbacks = 0
        self.is_over = False
        """Set at the very end: parked callbacks run, so that every task can be ended."""
        self.world: Any = None
        """What those who are made deep inside the roles belong to."""
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now

    def release(self, parked: deque[events.Handle]) -> None:
        self._ready.extend(parked)
        parked.clear()

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                raise DeadlockError("nothing is ready and no timer runs")
            self.now = max(self.now, timers[0]._when)
        while timers and timers[0]._when <= self.now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is not None and (process.is_paused or process.is_dead) and not self.is_over:
                process.parked.append(handle)
                continue
            self.num_callbacks += 1
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to count: it is dropped when its time comes."""

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Runs it here, a callback later: a thread of one's own, as far as anybody can tell."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(run)
        return future


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = current_process() if context is None else context.get(_process)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


class VirtualClock:
    """Stands in for the module `time` in code under test: its loop's time, and its process's idea of the wall clock."""

    perf_counter = staticmethod(time.perf_counter)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    process_time = staticmethod(time.process_time)

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def time() -> float:
        process = current_process()
        offset_s = 0.0 if process is None else process.wall_clock_offset_s
        return WALL_CLOCK_BEGIN_S + asyncio.get_running_loop().time() + offset_s

    @staticmethod
    def sleep(seconds: float) -> None:
        raise RuntimeError("nobody blocks the event loop")
