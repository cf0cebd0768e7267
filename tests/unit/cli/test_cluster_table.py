"""What `specdec ps`, `top` and `sessions` show."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from specdec.cli.cluster_table import (
    ENDPOINT_COLUMNS,
    HEADINGS,
    SESSION_COLUMNS,
    SESSION_HEADINGS,
    as_json,
    endpoint_row,
    health_of,
    remarks,
    session_row,
    status_lines,
    summary_line,
)
from specdec.cli.columns import as_lines, as_table
from specdec.ids import Epoch, SessionId
from specdec.messages import Load, ModelInfo, ServerStatus
from specdec.messages.cluster import CircuitState, ClusterStatus, EndpointStatus, Role, SessionState, SessionSummary

STATUS = ServerStatus(
    True,
    False,
    "1.2.3",
    1,
    model=ModelInfo("target", 10, 100, ""),
    load=Load(5, 2, kv_used_bytes=50, kv_budget_bytes=200, num_attachments=3),
)
VERIFIER = EndpointStatus(
    "10.0.0.1:1", Role.VERIFIER, True, False, STATUS, 0.0123, 4, 0.456, 78.96, last_error="PEER_UNAVAILABLE"
)
DRAFTER = EndpointStatus("10.0.0.2:1", Role.DRAFTER, True, False, dataclasses.replace(STATUS, proposer="ngram"))
UNKNOWN = EndpointStatus("10.0.0.3:1", Role.VERIFIER, False, False)


def test_a_row_tells_each_figure_under_its_heading() -> None:
    row = dict(zip(HEADINGS, endpoint_row(VERIFIER), strict=True))
    assert row == {
        "ROLE": "verifier",
        "ENDPOINT": "10.0.0.1:1",
        "HEALTH": "ok",
        "MODEL": "target",
        "VERSION": "1.2.3",
        "SESSIONS": "5",
        "WAITING": "2",
        "OWN": "4",
        "KV": "25 %",
        "ACCEPTED": "46 %",
        "TOK/S": "79.0",
        "RTT": "12.3 ms",
    }
    drafter = dict(zip(HEADINGS, endpoint_row(DRAFTER), strict=True))
    assert (drafter["MODEL"], drafter["SESSIONS"], drafter["WAITING"]) == ("ngram target", "3", "-")
    unknown = dict(zip(HEADINGS, endpoint_row(UNKNOWN), strict=True))
    assert (unknown["HEALTH"], unknown["MODEL"], unknown["SESSIONS"], unknown["RTT"]) == ("down", "-", "-", "-")


@pytest.mark.parametrize(
    ("changes", "health"),
    [
        ({}, "ok"),
        ({"drained": True}, "drained"),
        ({"healthy": False}, "down"),
        ({"healthy": False, "status": dataclasses.replace(STATUS, serving=False)}, "loading"),
        ({"status": dataclasses.replace(STATUS, draining=True)}, "leaving"),
        ({"circuit": CircuitState.OPEN}, "resting"),
        ({"circuit": CircuitState.HALF_OPEN}, "probed"),
    ],
)
def test_health_is_one_word(changes: dict[str, object], health: str) -> None:
    assert health_of(dataclasses.replace(VERIFIER, **changes)) == health  # type: ignore[arg-type]


def test_what_is_wrong_is_told_under_the_table_and_an_old_fault_is_not() -> None:
    down = dataclasses.replace(UNKNOWN, last_error="DEADLINE_EXCEEDED")
    status = ClusterStatus((VERIFIER, down), 0.0, store_healthy=False, drains_shared=True)
    told = remarks(status)
    assert len(told) == 2
    assert "store" in told[0]
    assert told[1] == "10.0.0.3:1: DEADLINE_EXCEEDED"
    assert status_lines(status)[-2:] == told


def test_columns_stand_under_their_headings_whatever_a_server_calls_itself() -> None:
    nasty = dataclasses.replace(STATUS, model=ModelInfo("\x1b[31mred", 10, 100, ""), version="v" * 30)
    status = ClusterStatus((dataclasses.replace(VERIFIER, status=nasty), DRAFTER), 0.0, True, True)
    lines = status_lines(status)
    assert "\x1b" not in "".join(lines)
    begins = lines[0].index("VERSION")
    assert lines[1][begins:].startswith("v" * 30)
    assert lines[2][begins:].startswith("1.2.3")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_terminal_too_narrow_for_all_columns_shows_fewer_and_those_whole(width: int) -> None:
    load = Load(5, 2, kv_used_bytes=50, kv_budget_bytes=200, num_attachments=3)
    long_name = dataclasses.replace(STATUS, model=ModelInfo("synthetic:seed=1,forward_ms=20", 10, 100, ""), load=load)
    verifier = dataclasses.replace(VERIFIER, endpoint="192.168.100.101:50051", status=long_name)
    status = ClusterStatus((verifier, DRAFTER), 0.0, True, True)
    headings, row, _ = status_lines(status, width)
    assert max(len(headings), len(row)) <= width < len(status_lines(status)[0])
    assert set(headings.split()) < set(HEADINGS)
    for cell in ("192.168.100.101:50051", "ok", "5", "46 %", "79.0"):
        assert cell in row
    console = Console(width=width, file=io.StringIO())
    console.print(as_table(ENDPOINT_COLUMNS, [endpoint_row(one) for one in status.endpoints], width=width))
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == status_lines(status, width)  # type: ignore[attr-defined]


def test_a_session_keeps_its_whole_id_on_any_terminal() -> None:
    session = SessionSummary(
        *(SessionId("f" * 34), Epoch(3), "192.168.100.101:50051", "192.168.100.102:50052", 5, 60, 1.0, 12.4),
        *("team", SessionState.STREAMING, 2, None, 4.84),
    )
    for width in (40, 80, 120):
        headings, row = as_lines(SESSION_COLUMNS, [session_row(session)], width)
        assert "f" * 34 in row
        assert "STATE" in headings
    assert len(headings) <= width


def test_the_summary_counts_verifiers_and_their_tokens() -> None:
    own = EndpointStatus("o:1", Role.ORCHESTRATOR, True, False, num_own_sessions=4, tokens_per_s=79.0)
    line = summary_line(ClusterStatus((own, VERIFIER, UNKNOWN, DRAFTER), 0.0, True, True))
    assert line.endswith("4 sessions, 79.0 tokens/s, 1 of 2 verifiers healthy")


def test_a_session_is_one_row_and_one_object_without_its_prompt() -> None:
    session = SessionSummary(
        *(SessionId("s"), Epoch(3), "v:1", "", 5, 60, 1.0, 12.4, "team", SessionState.STREAMING, 2, None, 4.84)
    )
    assert dict(zip(SESSION_HEADINGS, session_row(session), strict=True)) == {
        "SESSION": "s",
        "TENANT": "team",
        "STATE": "streaming",
        "VERIFIER": "v:1",
        "DRAFTER": "-",
        "PROMPT": "5",
        "OUTPUT": "60",
        "ACCEPTED": "-",
        "TOK/S": "4.8",
        "MOVED": "2",
        "EPOCH": "3",
        "AGE": "12 s",
    }
    assert json.loads(json.dumps(as_json(session)))["state"] == "STREAMING"


def test_a_status_is_one_object() -> None:
    told = json.loads(json.dumps(as_json(ClusterStatus((VERIFIER,), 5.0, True, False))))
    assert told["endpoints"][0]["role"] == "VERIFIER"
    assert told["endpoints"][0]["status"]["load"]["num_active_sessions"] == 5
