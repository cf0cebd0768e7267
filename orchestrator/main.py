"""The orchestrator as a process: put the rooms together, serve, and end in order on SIGTERM."""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from orchestrator.admin_servicer import AdminServicer
from orchestrator.admission import Admission
from orchestrator.cluster import Cluster
from orchestrator.discovery import StaticDiscovery
from orchestrator.drains import Drains
from orchestrator.edge.gate import edge_gate
from orchestrator.embedded_store import EmbeddedStore
from orchestrator.generation_servicer import GenerationServicer
from orchestrator.reaper import Reaper
from orchestrator.runner_context import RunnerContext
from orchestrator.session_store import SessionStore, StoreSettings
from orchestrator.sessions import Sessions
from orchestrator.side_tasks import cancel_and_wait
from orchestrator.store_health import StoreHealth
from orchestrator.tenant_limits import TenantLimits, TenantTable
from orchestrator.tenant_limits_file import TenantLimitsSource
from specdec.config import EMBEDDED_REDIS, OrchestratorSettings
from specdec.messages.cluster import Role
from specdec.telemetry import MetricsExporter, OrchestratorMetrics, configure_logging
from specdec.v1 import admin_pb2, generation_pb2
from specdec.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from specdec.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from specdec.wire.certificates import CertificateFiles
from specdec.wire.role_identity import role_certificates
from specdec.wire.server import GrpcServer
from specdec.wire.shutdown import shutdown_signal

_CLIENT_KEEPALIVE = {"keepalive_time_s": 10.0, "keepalive_timeout_s": 5.0}
"""Clients may be far away, and a stream that is cut by mistake costs more than one that is held a while longer."""
_STREAM_END_GRACE_S = 2.0
"""For the last frames of streams that have ended already."""

_log = structlog.get_logger(__name__)


async def serve(settings: OrchestratorSettings) -> None:
    """Returns after SIGTERM or SIGINT, when every stream has ended or was told to resume elsewhere.

    Raises:
        StoreUnavailableError: the embedded store does not start.
        OSError, ValueError: an address cannot be bound, or a file does not make sense.
    """
    configure_logging("orchestrator", settings.log_level)
    await serve_until(shutdown_signal(), settings)
    _log.info("stopped")


async def serve_until(
    stopping: asyncio.Event, settings: OrchestratorSettings, on_serving: Callable[[str], None] = lambda endpoint: None
) -> None:
    """The same without signals: serves until the event is set. `on_serving` is told the endpoint. Raises as `serve`."""
    limits = TenantLimitsSource(_tenant_limits(settings), settings.tenant_limits)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(SessionStore(await _store_settings(settings, stack)))
        store_health = StoreHealth(store)
        reaper = Reaper(store, on_reaped=lambda outcome: metrics.sessions_reaped.labels(outcome).inc())
        cluster = Cluster(
            StaticDiscovery(settings.verifiers, settings.drafters),
            interval_s=settings.health_interval_s,
            wire=settings.wire,
            certificates=role_certificates(settings.tls, Role.ORCHESTRATOR),
        )
        metrics = OrchestratorMetrics()
        context = RunnerContext(
            cluster=cluster,
            store=store,
            store_is_reachable=lambda: store_health.reachable,
            strict=settings.durability == "strict",
            metrics=metrics,
            failover_timeout_s=settings.failover_timeout_s,
        )
        admission = Admission(
            TenantTable(limits.limits_of),
            lambda: cluster.verifiers,
            max_sessions=settings.max_sessions,
            resume_reserve=settings.resume_reserve,
        )
        sessions = Sessions(context, admission)
        is_own_store = settings.redis.get_secret_value() == EMBEDDED_REDIS
        drains = Drains(cluster, sessions, store, shared=not is_own_store)
        admin = AdminServicer(sessions, cluster, store_health, drains)
        server = GrpcServer(
            settings.listen,
            wire=settings.wire.model_copy(update=_CLIENT_KEEPALIVE),
            insecure_bind=settings.insecure_bind,
            certificates=CertificateFiles(settings.edge_tls) if settings.edge_tls else None,
            gate=edge_gate(settings),
            with_reflection=settings.reflection,
        )
        server.add(
            add_GenerationServiceServicer_to_server,
            GenerationServicer(sessions, cluster, stall_s=settings.slow_reader_timeout_s),
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
        )
        server.add(add_AdminServiceServicer_to_server, admin, admin_pb2.DESCRIPTOR.services_by_name["AdminService"])
        exporter = stack.enter_context(MetricsExporter(metrics, settings.metrics, insecure_bind=settings.insecure_bind))
        drains.own_endpoint = await server.start()
        _log.info("listening", endpoint=drains.own_endpoint, metrics=exporter.endpoint)
        for watch in (cluster.run(), store_health.run(), reaper.run(), drains.run()):
            watching = asyncio.create_task(watch)
            watching.add_done_callback(lambda task: _on_watch_done(task, stopping))
            stack.push_async_callback(cancel_and_wait, watching)
        await drains.refresh()  # before the first stream: what was drained before a restart still is
        await server.set_serving()
        _log.info("serving", endpoint=drains.own_endpoint)
        on_serving(drains.own_endpoint)
        await stopping.wait()
        _log.info("draining", num_sessions=len(sessions.running))
        await server.set_not_serving()
        await sessions.drain(settings.drain_grace_s)
        await server.stop(_STREAM_END_GRACE_S)


async def _store_settings(settings: OrchestratorSettings, stack: contextlib.AsyncExitStack) -> StoreSettings:
    url = settings.redis.get_secret_value()
    if url == EMBEDDED_REDIS:
        url = (await stack.enter_async_context(EmbeddedStore())).url
    return StoreSettings(
        url,
        lease_s=settings.lease_s,
        session_ttl_s=settings.session_ttl_s,
        abandoned_ttl_s=settings.abandoned_ttl_s,
        store_tokens=settings.store_tokens,
        token_key_file=settings.token_key_file,
    )


def _tenant_limits(settings: OrchestratorSettings) -> TenantLimits:
    return TenantLimits(
        requests_per_s=settings.tenant_requests_per_s,
        request_burst=settings.tenant_request_burst,
        tokens_per_s=settings.tenant_tokens_per_s,
        token_burst=settings.tenant_token_burst,
        max_streams=settings.tenant_max_streams,
    )


def _on_watch_done(task: asyncio.Task[None], stopping: asyncio.Event) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("watch_failed", error=type(error).__name__, exc_info=error)
        stopping.set()  # blind, it would route to the dead: whoever runs it starts it again
