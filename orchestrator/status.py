"""What the orchestrator tells of itself and of the models behind it. Reads, changes nothing."""

from orchestrator.cluster import Cluster
from orchestrator.sessions import Sessions
from specdec import PROTOCOL_VERSION, __version__
from specdec.messages import Load, ModelInfo, ServerStatus


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
