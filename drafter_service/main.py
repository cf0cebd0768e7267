"""The drafter's process: bind, load, serve, leave every session, end."""

import asyncio
import os
import time

import structlog

from drafter_service.device import DeviceThread
from drafter_service.drafter import Drafter
from drafter_service.proposers.base import Proposer
from drafter_service.proposers.registry import create_proposer
from drafter_service.servicer import DrafterServicer
from specdec.config import DrafterSettings
from specdec.daemon_thread import in_daemon_thread
from specdec.messages.cluster import Role
from specdec.telemetry import DrafterMetrics, MetricsExporter, configure_logging
from specdec.v1 import drafter_pb2
from specdec.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server
from specdec.wire.role_identity import RoleGate, role_certificates
from specdec.wire.server import GrpcServer
from specdec.wire.shutdown import shutdown_signal

log = structlog.get_logger(__name__)


async def serve(settings: DrafterSettings) -> None:
    """Runs the drafter until SIGTERM or SIGINT. Answers NOT_SERVING and LOADING until the proposer is there.

    Raises ModelLoadError where the model cannot be had, OSError where an address cannot be bound or a file not
    be read, UnusableFileError where a certificate is of no use.
    """
    configure_logging("drafter", settings.log_level)
    os.nice(settings.niceness)
    stopping = shutdown_signal()
    metrics = DrafterMetrics()
    device = DeviceThread()
    servicer = DrafterServicer(settings.proposer)
    certificates = role_certificates(settings.tls, Role.DRAFTER)
    server = GrpcServer(
        settings.listen,
        wire=settings.wire,
        insecure_bind=settings.insecure_bind,
        certificates=certificates,
        gate=RoleGate() if certificates else None,
        with_reflection=settings.reflection,
    )
    server.add(
        add_DrafterServiceServicer_to_server, servicer, drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
    )
    with MetricsExporter(metrics, settings.metrics, insecure_bind=settings.insecure_bind) as exporter:
        endpoint = await server.start()
        log.info("listening", endpoint=endpoint, metrics=exporter.endpoint)
        loading = asyncio.create_task(_load(settings))
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                drafter = Drafter(
                    loading.result(),
                    device,
                    metrics,
                    max_sessions=settings.max_sessions,
                    max_draft_tokens=settings.max_draft_tokens,
                    wire=settings.wire,
                    certificates=certificates,
                )
                servicer.drafter = drafter
                await server.set_serving()
                log.info("serving", endpoint=endpoint, proposer=settings.proposer, model=settings.model)
                await stop
                # A session loses speed alone when its drafter leaves, so nothing is waited for.
                await server.set_not_serving()
                await drafter.close()
        finally:
            stop.cancel()
            await server.stop(settings.drain_grace_s if loading.done() else 0.0)
            await device.close()
    log.info("stopped")


async def _load(settings: DrafterSettings) -> Proposer:
    started_at = time.monotonic()
    proposer = await in_daemon_thread(lambda: create_proposer(settings), "load")
    log.info(
        "loaded",
        proposer=settings.proposer,
        model=settings.model,
        quantization=settings.quantization if proposer.model_info else "",
        elapsed_s=round(time.monotonic() - started_at, 2),
    )
    return proposer
