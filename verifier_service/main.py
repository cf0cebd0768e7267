"""The verifier's process: bind, load, prove, serve, drain."""

import asyncio
import time

import structlog

from specdec.config import VerifierSettings
from specdec.daemon_thread import in_daemon_thread
from specdec.decoding.rounds import warm_up
from specdec.model.loading import LoadedModel, load_model
from specdec.telemetry import MetricsExporter, VerifierMetrics, configure_logging
from specdec.v1 import verifier_pb2
from specdec.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from specdec.wire.server import GrpcServer
from specdec.wire.shutdown import shutdown_signal
from verifier_service.admission import EngineLimits
from verifier_service.observer import MetricsObserver
from verifier_service.scheduler import SchedulerPolicy
from verifier_service.servicer import VerifierServicer
from verifier_service.target import Target, start_target

log = structlog.get_logger(__name__)

DRAIN_POLL_S = 0.05
LAST_FRAMES_S = 1.0
"""For the last frames of streams that have ended already."""
LAST_STEP_S = 5.0
"""For a forward pass that is running."""


async def serve(settings: VerifierSettings) -> None:
    """Runs the verifier until SIGTERM or SIGINT. Answers NOT_SERVING and LOADING until the model is there.

    Raises ModelLoadError where the model cannot be had, OSError where an address cannot be bound.
    """
    configure_logging("verifier", settings.log_level)
    stopping = shutdown_signal()
    metrics = VerifierMetrics()
    servicer = VerifierServicer()
    server = GrpcServer(settings.listen, wire=settings.wire, insecure_bind=settings.insecure_bind)
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


async def _load(settings: VerifierSettings, metrics: VerifierMetrics) -> Target:
    started_at = time.monotonic()
    model = await in_daemon_thread(lambda: _load_model(settings), "load")
    self_check = await in_daemon_thread(model.prove, "self-check")
    await in_daemon_thread(lambda: warm_up(model.runner.vocabulary_size), "warm-up")
    log.info(
        "loaded",
        model=settings.model,
        elapsed_s=round(time.monotonic() - started_at, 2),
        numerics_fingerprint=model.runner.numerics.fingerprint,
        weights_dtype=model.runner.numerics.weights_dtype,
        linear_kernel=model.runner.numerics.linear_kernel,
        self_check_passed=self_check.passed,
        max_rows=self_check.max_rows,
        num_comparisons=self_check.num_comparisons,
        kv_budget_mib=model.runner.kv_budget_bytes >> 20,
        num_kv_blocks=model.runner.pool.num_blocks,
    )
    if not self_check.passed:
        log.warning("logits depend on their batch on this device: output is not bit-exact", detail=self_check.detail)
    max_step_rows = min(settings.max_step_rows or model.runner.step_rows, model.runner.max_rows)
    policy = SchedulerPolicy(max_step_rows, settings.max_draft_tokens, settings.draft_wait_ms / 1000)
    limits = EngineLimits(
        settings.max_sessions,
        settings.max_waiting_sessions,
        settings.default_max_new_tokens,
        prefix_caching=settings.prefix_caching,
    )
    observer = MetricsObserver(metrics)
    return start_target(model, self_check, policy, limits, observer, asyncio.get_running_loop())


def _load_model(settings: VerifierSettings) -> LoadedModel:
    return load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        num_threads=settings.threads,
        kv_budget_bytes=None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20,
    )


async def _drain(servicer: VerifierServicer, target: Target, server: GrpcServer, grace_s: float) -> None:
    """No new sessions; the open ones may finish within the grace."""
    log.info("draining", grace_s=grace_s)
    servicer.draining = True
    await server.set_not_serving()
    target.device.submit_release(lambda: target.engine.drain(grace_s))
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        load = target.engine.load()
        if load.num_active_sessions + load.num_waiting_sessions == 0:
            return
        await asyncio.sleep(DRAIN_POLL_S)
