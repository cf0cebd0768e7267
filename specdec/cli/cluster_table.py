"""What runs where, as rows of a table and as JSON. Pure: asks nobody."""

import dataclasses
import datetime
from enum import Enum
from typing import Any

from specdec.cli.columns import Columns, as_lines
from specdec.messages.cluster import CircuitState, ClusterStatus, EndpointStatus, Role, SessionSummary

HEADINGS = (
    *("ROLE", "ENDPOINT", "HEALTH", "MODEL", "VERSION", "SESSIONS", "WAITING", "OWN", "KV", "ACCEPTED", "TOK/S"),
    "RTT",
)
"""SESSIONS and WAITING: all that the server told of. OWN, ACCEPTED, TOK/S: of the orchestrator that was asked."""
ENDPOINT_COLUMNS = Columns(HEADINGS, frozenset(HEADINGS[5:]), ("VERSION", "RTT", "KV", "OWN", "WAITING", "MODEL"))
SESSION_HEADINGS = (
    *("SESSION", "TENANT", "STATE", "VERIFIER", "DRAFTER", "PROMPT", "OUTPUT", "ACCEPTED", "TOK/S", "MOVED", "EPOCH"),
    "AGE",
)
SESSION_COLUMNS = Columns(
    SESSION_HEADINGS,
    frozenset(SESSION_HEADINGS[5:]),
    ("EPOCH", "PROMPT", "ACCEPTED", "MOVED", "DRAFTER", "TOK/S", "AGE", "TENANT", "VERIFIER"),
)
_NONE = "-"
_BAD, _IDLE = "red", "yellow"


def endpoint_row(endpoint: EndpointStatus) -> tuple[str, ...]:
    status = endpoint.status
    load = status.load if status is not None else None
    is_drafter = endpoint.role is Role.DRAFTER
    num_sessions = None if load is None else load.num_attachments if is_drafter else load.num_active_sessions
    return (
        endpoint.role.value.lower(),
        endpoint.endpoint,
        health_of(endpoint),
        _model_of(endpoint),
        status.version if status is not None else _NONE,
        _NONE if num_sessions is None else str(num_sessions),
        _NONE if load is None or is_drafter else str(load.num_waiting_sessions),
        str(endpoint.num_own_sessions),
        _share(load.kv_used_bytes, load.kv_budget_bytes) if load is not None else _NONE,
        _percent(endpoint.acceptance_rate),
        f"{endpoint.tokens_per_s:.1f}",
        _NONE if endpoint.round_trip_time_s is None else f"{endpoint.round_trip_time_s * 1000:.1f} ms",
    )


def health_of(endpoint: EndpointStatus) -> str:
    """One word."""
    status = endpoint.status
    if endpoint.drained:
        return "drained"
    if not endpoint.healthy:
        return "loading" if status is not None and not status.serving and not status.draining else "down"
    if status is not None and status.draining:
        return "leaving"
    return {CircuitState.OPEN: "resting", CircuitState.HALF_OPEN: "probed"}.get(endpoint.circuit, "ok")


def style_of(endpoint: EndpointStatus) -> str | None:
    """Of its row."""
    match health_of(endpoint):
        case "ok":
            return None
        case "down" | "resting":
            return _BAD
        case _:
            return _IDLE


def remarks(status: ClusterStatus) -> list[str]:
    """What is wrong, one line each."""
    lines = [] if status.store_healthy else ["the session store does not answer: sessions cannot be resumed"]
    lines += [
        f"{endpoint.endpoint}: {endpoint.last_error}"
        for endpoint in status.endpoints
        if endpoint.last_error and health_of(endpoint) in ("down", "resting", "probed")
    ]
    return lines


def status_lines(status: ClusterStatus, width: int | None = None) -> list[str]:
    """As plain text."""
    rows = [endpoint_row(endpoint) for endpoint in status.endpoints]
    return [*as_lines(ENDPOINT_COLUMNS, rows, width), *remarks(status)]


def summary_line(status: ClusterStatus) -> str:
    """The moment, and sums over the verifiers."""
    taken_at = datetime.datetime.fromtimestamp(status.taken_at_unix_s).astimezone()
    verifiers = [endpoint for endpoint in status.endpoints if endpoint.role is Role.VERIFIER]
    num_tokens_per_s = sum(endpoint.tokens_per_s for endpoint in verifiers)
    num_own = sum(endpoint.num_own_sessions for endpoint in status.endpoints if endpoint.role is Role.ORCHESTRATOR)
    num_ok = sum(endpoint.healthy for endpoint in verifiers)
    return (
        f"{taken_at:%H:%M:%S}  {num_own} sessions, {num_tokens_per_s:.1f} tokens/s, "
        f"{num_ok} of {len(verifiers)} verifiers healthy"
    )


def session_row(session: SessionSummary) -> tuple[str, ...]:
    return (
        session.session_id,
        session.tenant or _NONE,
        session.state.value.lower(),
        session.verifier_endpoint or _NONE,
        session.drafter_endpoint or _NONE,
        str(session.num_prompt_tokens),
        str(session.num_output_tokens),
        _percent(session.acceptance_rate),
        f"{session.tokens_per_s:.1f}",
        str(session.num_failovers),
        str(session.epoch),
        f"{session.age_s:.0f} s",
    )


def as_json(value: ClusterStatus | SessionSummary) -> dict[str, Any]:
    """With the names of the dataclass; enums by their names."""
    return {field: _plain(item) for field, item in dataclasses.asdict(value).items()}


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Enum():
            return value.value
        case _:
            return value


def _model_of(endpoint: EndpointStatus) -> str:
    status = endpoint.status
    if status is None:
        return _NONE
    names = [status.proposer, status.model.name if status.model is not None else ""]
    return " ".join(name for name in names if name) or _NONE


def _percent(rate: float | None) -> str:
    return _NONE if rate is None else f"{100 * rate:.0f} %"


def _share(used: int, budget: int) -> str:
    return _percent(used / budget) if budget else _NONE
