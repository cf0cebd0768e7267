"""What the orchestrator tells of itself, of its sessions and of the servers behind it. Reads, changes nothing."""

import time

from orchestrator.cluster import Cluster
from orchestrator.endpoints import EndpointView
from orchestrator.session_runner import SessionRunner
from orchestrator.sessions import Sessions
from specdec import PROTOCOL_VERSION, __version__
from specdec.messages import Load, ModelInfo, ServerStatus
from specdec.messages.cluster import ClusterStatus, EndpointStatus, Role, SessionState, SessionSummary
from specdec.session import SessionPhase

_MIN_AGE_S = 0.001
_STATES = {SessionPhase.OPENED: SessionState.OPENED, SessionPhase.STREAMING: SessionState.STREAMING}


def own_status(sessions: Sessions) -> ServerStatus:
    num_waiting = sum(runner.verifier == "" for runner in sessions.running.values())
    return ServerStatus(
        serving=not sessions.draining,
        draining=sessions.draining,
        version=__version__,
        protocol_version=PROTOCOL_VERSION,
        load=Load(
            num_active_sessions=len(sessions.running) - num_waiting,
            num_waiting_sessions=num_waiting,
            num_attachments=sum(runner.drafter != "" for runner in sessions.running.values()),
        ),
    )


def models_served(cluster: Cluster) -> list[ModelInfo]:
    """One of each name that can be asked for now, by name."""
    models = {
        view.status.model.name: view.status.model
        for view in cluster.verifiers
        if view.takes_sessions and view.status is not None and view.status.model is not None
    }
    return [models[name] for name in sorted(models)]


def cluster_status(
    own_endpoint: str, sessions: Sessions, cluster: Cluster, *, store_healthy: bool, drains_shared: bool
) -> ClusterStatus:
    """Every server, this one first."""
    num_sessions = {**sessions.num_by_verifier(), **sessions.num_by_drafter()}
    now_s = time.monotonic()

    def described(view: EndpointView) -> EndpointStatus:
        figures = sessions.figures.of(view.endpoint, now_s)
        return EndpointStatus(
            view.endpoint,
            view.role,
            healthy=view.healthy,
            drained=view.drained,
            status=view.status if view.round_trip_time_s is not None else None,  # it answered the last look
            round_trip_time_s=view.round_trip_time_s,
            num_own_sessions=num_sessions.get(view.endpoint, 0),
            acceptance_rate=figures.acceptance_rate,
            tokens_per_s=figures.tokens_per_s,
            circuit=view.circuit,
            last_error=view.last_error,
        )

    verifiers = [described(view) for view in cluster.verifiers]
    own = EndpointStatus(
        own_endpoint,
        Role.ORCHESTRATOR,
        healthy=True,
        drained=sessions.drained,
        status=own_status(sessions),
        num_own_sessions=len(sessions.running),
        tokens_per_s=sum(verifier.tokens_per_s for verifier in verifiers),
    )
    return ClusterStatus(
        (own, *verifiers, *(described(view) for view in cluster.drafters)),
        taken_at_unix_s=time.time(),
        store_healthy=store_healthy,
        drains_shared=drains_shared,
    )


def session_page(sessions: Sessions, after: str, size: int) -> tuple[list[SessionSummary], bool]:
    """The next `size` sessions by their ids, and whether there are more. What begins or ends meanwhile moves none."""
    later = sorted(name for name in sessions.running if name > after)
    return [_session_summary(sessions.running[name]) for name in later[:size]], len(later) > size


def _session_summary(runner: SessionRunner) -> SessionSummary:
    session = runner.session
    age_s = max(_MIN_AGE_S, runner.age_s)
    num_output_tokens = session.usage.num_output_tokens
    speculative = session.speculative
    return SessionSummary(
        session_id=session.session_id,
        epoch=session.epoch,
        verifier_endpoint=runner.verifier,
        drafter_endpoint=runner.drafter,
        num_prompt_tokens=session.prompt_length,
        num_output_tokens=num_output_tokens,
        opened_at_unix_s=runner.opened_at_unix_s,
        age_s=age_s,
        tenant=runner.tenant,
        state=_state(runner),
        num_failovers=runner.num_failovers,
        acceptance_rate=(
            speculative.num_accepted_tokens / speculative.num_draft_tokens if speculative.num_draft_tokens else None
        ),
        tokens_per_s=max(0, num_output_tokens - runner.num_received_tokens) / age_s,
    )


def _state(runner: SessionRunner) -> SessionState:
    if runner.is_over:
        return SessionState.ENDING
    return _STATES.get(runner.session.phase, SessionState.CLAIMED)
