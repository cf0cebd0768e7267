"""The real roles' own `serve`, with sockets, threads, clocks and models replaced. Who is started is a process here.

`installed` replaces them everywhere; which world they belong to is the running loop's. Nothing of the roles' logic is
written again.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import structlog
import torch
from pydantic import SecretStr

import drafter_service.device
import drafter_service.draft_loop
import drafter_service.main
import specdec.telemetry
import specdec.wire.channel
import specdec.wire.server
import specdec.wire.shutdown
import verifier_service.main
import verifier_service.target
from specdec.config import DrafterSettings, OrchestratorSettings, VerifierSettings, WireSettings
from specdec.messages import ModelInfo, Numerics, SelfCheck
from specdec.telemetry import DrafterMetrics, OrchestratorMetrics, VerifierMetrics
from tests.simulation.rpc import SimChannel, SimServer, own_process
from tests.simulation.store_client import SimRedis
from tests.simulation.target import MODEL, SimProposer, SimRunner, SimTokenizer
from tests.simulation.virtual_time import VirtualClock, current_process, running_world
from verifier_service.admission import EngineLimits
from verifier_service.engine import Engine
from verifier_service.scheduler import SchedulerPolicy
from verifier_service.target import Target

FORWARD_S = 0.1
"""Slow, so that faults meet sessions that run: virtual time costs nothing."""
PACKAGES = ("specdec", "orchestrator", "drafter_service", "verifier_service")


class NoExporter:
    """Metrics that nobody scrapes."""

    endpoint = "127.0.0.1:1"

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "NoExporter":
        return self

    def __exit__(self, *_: object) -> None: ...


class SimVerifierDevice:
    """The verifier's device thread as a task of the loop: a forward takes its time, and commands wait meanwhile."""

    def __init__(self, step: Callable[[], float | None], runner: SimRunner, on_error: Callable[[str], None]) -> None:
        self._step, self._runner, self._on_error = step, runner, on_error
        self._commands: deque[Callable[[], None]] = deque()
        self._outbox: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self.on_event: Callable[[Callable[[Any], None], Any], None] = lambda sink, item: None
        self._task = own_process().spawn(self._run(), "device")

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    submit_release = submit

    def post(self, function: Callable[[], None]) -> None:
        self._outbox.append(function)

    def sink(self, mailbox: Any) -> Callable[[Any], None]:
        def send(item: Any) -> None:
            self.on_event(send, item)
            self._outbox.append(lambda: mailbox.put(item))

        return send

    async def stop(self, timeout_s: float) -> bool:
        self._task.cancel()
        return True

    async def _run(self) -> None:
        wake_at: float | None = 0.0
        loop = asyncio.get_running_loop()
        while True:
            if not self._commands:
                wait_s = 1.0 if wake_at is None else min(1.0, wake_at - loop.time())
                if wait_s > 0:
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._wake.wait()
            for _ in range(len(self._commands)):
                self._do(self._commands.popleft())
            self._flush()
            num_forwards = self._runner.num_forwards
            wake_at = self._do(self._step)
            if self._runner.num_forwards > num_forwards:
                await asyncio.sleep(FORWARD_S)
            self._flush()

    def _do(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            self._on_error(f"{own_process().name}: the device's thread raised {error!r}")
            return None

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        for put in batch:
            put()


class SimDrafterDevice:
    """The drafter's device thread: calls in turn, each some milliseconds long."""

    CALL_S = 0.003

    def __init__(self) -> None:
        self._free_at = 0.0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._free_at = max(self._free_at, loop.time()) + self.CALL_S
        loop.call_at(self._free_at, call)
        return future

    def run_and_forget(self, function: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(function)

    async def close(self) -> None: ...


def _stopping() -> asyncio.Event:
    event = asyncio.Event()
    running_world().stopping[own_process()] = event
    return event


def numerics(fingerprint: str) -> Numerics:
    return Numerics(fingerprint, "weights", "float32", "float32", "cpu", "hash", "hash", "none")


async def _load_target(settings: VerifierSettings, metrics: VerifierMetrics) -> Target:
    """As verifier_service.target.load_target, without a model."""
    runner, tokenizer = SimRunner(num_blocks=48), SimTokenizer()
    runner.numerics = numerics(settings.model)
    policy = SchedulerPolicy(max_step_rows=32, max_draft_tokens=4, draft_wait_s=0.1)
    limits = EngineLimits(settings.max_sessions, settings.max_waiting_sessions, settings.default_max_new_tokens)
    observer = verifier_service.main.MetricsObserver(metrics)
    engine = Engine(MODEL, runner, tokenizer, policy, limits, observer, VirtualClock.monotonic)  # type: ignore[arg-type]
    device = SimVerifierDevice(engine.step, runner, running_world().fail)
    running_world().monitors.watch_engine(own_process(), engine, device)
    info = ModelInfo(MODEL, runner.vocabulary_size, runner.context_limit, tokenizer.fingerprint, runner.numerics)
    self_check = SelfCheck(True, 32, (), 0, "", 0.0)
    return Target(info, self_check, tokenizer, engine, device)  # type: ignore[arg-type]


async def _load_proposer(settings: DrafterSettings) -> SimProposer:
    return SimProposer()


def _open_channel(endpoint: str, wire: WireSettings | None = None, *_: object, **__: object) -> SimChannel:
    return SimChannel(running_world().network, endpoint, wire or WireSettings())


def _connect_store(*_: object, call_timeout_s: float = 1.0, **__: object) -> SimRedis:
    return SimRedis(running_world().store_link, call_timeout_s)


class _ErrorLog(logging.Handler):
    """What the standard library's loggers tell as an error."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell_log("error", record.name, record.getMessage(), record.exc_info and record.exc_info[1])


def _tell_log(level: str, *what: object) -> None:
    with contextlib.suppress(RuntimeError):  # after the end
        process = current_process()
        text = f"{process.name if process else 'nobody'} logs {' '.join(str(one) for one in what)}"
        if level in ("error", "critical", "exception"):
            running_world().fail(text)
        else:
            running_world().note(text)


def _take_event(_logger: object, level: str, event: dict[str, Any]) -> None:
    if level != "debug":
        fields = [f"{key}={value}" for key, value in event.items() if key not in ("event", "exc_info")]
        _tell_log(level, event.get("event"), *fields, event.get("exc_info", ""))
    raise structlog.DropEvent


@contextlib.contextmanager
def _logs_captured() -> Iterator[None]:
    """Errors that are logged are violations: where the logic holds, nobody has one to log."""
    before = structlog.get_config()
    structlog.configure(processors=[_take_event], cache_logger_on_first_use=False)
    handler = _ErrorLog(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        structlog.configure(**before)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replaces what a simulation must not have, in every module of ours."""
    with pytest.MonkeyPatch.context() as patch:
        orchestrator_metrics, verifier_metrics, drafter_metrics = (
            OrchestratorMetrics(),
            VerifierMetrics(),
            DrafterMetrics(),
        )
        for real, stand_in in (
            (time, VirtualClock),
            (specdec.wire.server.GrpcServer, SimServer),
            (specdec.telemetry.MetricsExporter, NoExporter),
            (specdec.telemetry.configure_logging, lambda *_: None),
            (specdec.wire.shutdown.shutdown_signal, _stopping),
            (specdec.wire.channel.open_channel, _open_channel),
            (drafter_service.device.DeviceThread, SimDrafterDevice),
            (OrchestratorMetrics, lambda: orchestrator_metrics),
            (VerifierMetrics, lambda: verifier_metrics),
            (DrafterMetrics, lambda: drafter_metrics),
            (verifier_service.main._load, _load_target),
            (drafter_service.main._load, _load_proposer),
            (
                drafter_service.draft_loop.DraftLoop,
                functools.partial(drafter_service.draft_loop.DraftLoop, clock=VirtualClock.monotonic),
            ),
        ):
            _replace_everywhere(patch, real, stand_in)
        patch.setattr(sys, "setswitchinterval", lambda interval: None)
        patch.setattr(os, "nice", lambda increment: 0)
        patch.setattr("orchestrator.store_client.connect", _connect_store)
        for module in ("orchestrator.lease_index", "orchestrator.reaper"):
            patch.setattr(f"{module}.NUM_SHARDS", 1)  # else most of a schedule's work is looking for the abandoned
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a round of a few rows waits longer for a second thread than it takes
        gc.collect()
        gc.freeze()  # torch and its kin need not be looked at again for every schedule
        with _logs_captured():
            yield
        gc.unfreeze()
        torch.set_num_threads(num_threads)


def _replace_everywhere(patch: pytest.MonkeyPatch, real: object, stand_in: object) -> None:
    modules: list[ModuleType] = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in PACKAGES and module
    ]
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is real:
                patch.setattr(module, name, stand_in)


@functools.cache
def verifier_settings(endpoint: str, fingerprint: str) -> VerifierSettings:
    """`fingerprint` stands for the model: verifiers of another one have other numerics."""
    return VerifierSettings(listen=endpoint, model=fingerprint, default_max_new_tokens=24, max_sessions=8)


@functools.cache
def drafter_settings(endpoint: str) -> DrafterSettings:
    return DrafterSettings(listen=endpoint, proposer="ngram")


@functools.cache
def orchestrator_settings(
    endpoint: str, verifiers: tuple[str, ...], drafters: tuple[str, ...], strict: bool
) -> OrchestratorSettings:
    return OrchestratorSettings(
        listen=endpoint,
        verifiers=verifiers,
        drafters=drafters,
        redis=SecretStr("redis://127.0.0.1:6379"),
        durability="strict" if strict else "relaxed",
        session_ttl_s=600.0,
        lease_s=5.0,
    )
