"""The verifier's process: bind, load, prove, serve, drain."""

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING

import structlog

from specdec.config import VerifierSettings
from specdec.daemon_thread import in_daemon_thread
from specdec.messages.cluster import Role
from specdec.telemetry import MetricsExporter, VerifierMetrics, configure_logging
from specdec.v1 import verifier_pb2
from specdec.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from specdec.wire.role_identity import RoleGate, role_certificates
from specdec.wire.server import GrpcServer
from specdec.wire.shutdown import shutdown_signal
from verifier_service.observer import MetricsObserver
from verifier_service.servicer import VerifierServicer

if TYPE_CHECKING:
    from verifier_service.target import Target

log = structlog.get_logger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""The device's thread waits no longer than this for the interpreter, where the event loop has much to write."""
DRAIN_POLL_S = 0.05
LAST_FRAMES_S = 1.0
"""For the last frames of streams that have ended already."""
LAST_STEP_S = 5.0
"""For a forward pass that is running."""


async def serve(settings: VerifierSettings) -> None:
    """Runs the verifier until SIGTERM or SIGINT. Answers NOT_SERVING and LOADING until the model is there.

    Raises ModelLoadError where the model cannot be had, OSError where an address cannot be bound or a file not
    be read, UnusableFileError where a certificate is of no use.
    """
    configure_logging("verifier", settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stopping = shutdown_signal()
    metrics = VerifierMetrics()
    servicer = VerifierServicer(settings.max_verify_streams_per_peer)
    certificates = role_certificates(settings.tls, Role.VERIFIER)
    server = GrpcServer(
        settings.listen,
        wire=settings.wire,
        insecure_bind=settings.insecure_bind,
        certificates=certificates,
        gate=RoleGate() if certificates else None,
        with_reflection=settings.reflection,
    )
    service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
    server.add(add_VerifierServiceServicer_to_server, servicer, service)
    with MetricsExporter(metrics, settings.metrics, insecure_bind=settings.insecure_bind) as exporter:
        endpoint = await server.start()
        log.info("listening", endpoint=endpoint, metrics=exporter.endpoint)
        loading = asyncio.create_task(_load(settings, metrics))
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                servicer.target = loading.result()
                await server.set_serving()
                log.info("serving", endpoint=endpoint, model=settings.model)
                await stop
                await _drain(servicer, servicer.target, server, settings.drain_grace_s)
        finally:
            stop.cancel()
            servicer.end_verify_streams()
            await server.stop(LAST_FRAMES_S if loading.done() else 0.0)
            if servicer.target is not None:
                await servicer.target.device.stop(LAST_STEP_S)
    log.info("stopped")


async def _load(settings: VerifierSettings, metrics: VerifierMetrics) -> "Target":
    loop = asyncio.get_running_loop()

    def load() -> "Target":
        # Here and not above: torch takes seconds to import and kernels up to a minute to compile the first time, and by
        # then somebody wants to know that the process is alive, or wants it to end.
        from verifier_service.target import load_target

        return load_target(settings, MetricsObserver(metrics), loop)

    return await in_daemon_thread(load, "load")


async def _drain(servicer: VerifierServicer, target: "Target", server: GrpcServer, grace_s: float) -> None:
    """No new sessions. The owners of the open ones have the grace to take them elsewhere, or let them finish."""
    log.info("draining", grace_s=grace_s)
    servicer.draining = True
    await server.set_not_serving()
    target.device.submit_release(lambda: target.engine.drain(grace_s))
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        load = target.engine.load()
        if load.num_active_sessions + load.num_waiting_sessions == 0:
            break
        await asyncio.sleep(DRAIN_POLL_S)
    else:
        log.warning("sessions_are_left")
    ended = asyncio.Event()

    def end() -> None:
        target.engine.end_sessions()
        target.device.post(ended.set)

    target.device.submit_release(end)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), LAST_STEP_S)
