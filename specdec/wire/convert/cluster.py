"""What AdminService tells: the servers and the sessions of one orchestrator."""

from specdec.ids import Epoch
from specdec.messages.cluster import CircuitState, ClusterStatus, EndpointStatus, Role, SessionState, SessionSummary
from specdec.v1 import admin_pb2 as pb
from specdec.wire.convert.enums import EnumCodec
from specdec.wire.convert.scalars import (
    duration_from_pb,
    duration_to_pb,
    natural_from_pb,
    optional_duration_to_pb,
    session_id_from_pb,
    timestamp_from_pb,
    timestamp_to_pb,
)
from specdec.wire.convert.status import server_status_from_pb, server_status_to_pb

ROLE = EnumCodec(Role, pb.Role)
CIRCUIT_STATE = EnumCodec(CircuitState, pb.CircuitState)
SESSION_STATE = EnumCodec(SessionState, pb.SessionState)


def cluster_status_to_pb(status: ClusterStatus) -> pb.ClusterStatus:
    return pb.ClusterStatus(
        endpoints=[_endpoint_to_pb(endpoint) for endpoint in status.endpoints],
        taken_at=timestamp_to_pb(status.taken_at_unix_s),
        store_healthy=status.store_healthy,
        drains_shared=status.drains_shared,
    )


def cluster_status_from_pb(message: pb.ClusterStatus) -> ClusterStatus:
    return ClusterStatus(
        endpoints=tuple(_endpoint_from_pb(endpoint) for endpoint in message.endpoints),
        taken_at_unix_s=timestamp_from_pb(message.taken_at, "taken_at"),
        store_healthy=message.store_healthy,
        drains_shared=message.drains_shared,
    )


def session_summary_to_pb(summary: SessionSummary) -> pb.SessionSummary:
    return pb.SessionSummary(
        session_id=summary.session_id,
        epoch=summary.epoch,
        verifier_endpoint=summary.verifier_endpoint,
        drafter_endpoint=summary.drafter_endpoint,
        num_prompt_tokens=summary.num_prompt_tokens,
        num_output_tokens=summary.num_output_tokens,
        opened_at=timestamp_to_pb(summary.opened_at_unix_s),
        tenant=summary.tenant,
        state=SESSION_STATE.to_pb(summary.state),
        num_failovers=summary.num_failovers,
        acceptance_rate=summary.acceptance_rate,
        tokens_per_second=summary.tokens_per_s,
        age=duration_to_pb(summary.age_s),
    )


def session_summary_from_pb(message: pb.SessionSummary) -> SessionSummary:
    return SessionSummary(
        session_id=session_id_from_pb(message.session_id),
        epoch=Epoch(natural_from_pb(message.epoch, "epoch")),
        verifier_endpoint=message.verifier_endpoint,
        drafter_endpoint=message.drafter_endpoint,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        opened_at_unix_s=timestamp_from_pb(message.opened_at, "opened_at"),
        tenant=message.tenant,
        state=SESSION_STATE.from_pb(message.state),
        num_failovers=message.num_failovers,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        tokens_per_s=message.tokens_per_second,
        age_s=duration_from_pb(message.age, "age"),
    )


def _endpoint_to_pb(endpoint: EndpointStatus) -> pb.EndpointStatus:
    return pb.EndpointStatus(
        endpoint=endpoint.endpoint,
        role=ROLE.to_pb(endpoint.role),
        healthy=endpoint.healthy,
        drained=endpoint.drained,
        status=None if endpoint.status is None else server_status_to_pb(endpoint.status),
        round_trip_time=optional_duration_to_pb(endpoint.round_trip_time_s),
        num_own_sessions=endpoint.num_own_sessions,
        acceptance_rate=endpoint.acceptance_rate,
        tokens_per_second=endpoint.tokens_per_s,
        circuit=CIRCUIT_STATE.to_pb(endpoint.circuit),
        last_error=endpoint.last_error,
    )


def _endpoint_from_pb(message: pb.EndpointStatus) -> EndpointStatus:
    has_time = message.HasField("round_trip_time")
    return EndpointStatus(
        endpoint=message.endpoint,
        role=ROLE.from_pb(message.role),
        healthy=message.healthy,
        drained=message.drained,
        status=server_status_from_pb(message.status) if message.HasField("status") else None,
        round_trip_time_s=duration_from_pb(message.round_trip_time, "round_trip_time") if has_time else None,
        num_own_sessions=message.num_own_sessions,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        tokens_per_s=message.tokens_per_second,
        circuit=CIRCUIT_STATE.optional_from_pb(message.circuit) or CircuitState.CLOSED,
        last_error=message.last_error,
    )
