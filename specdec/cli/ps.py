"""`specdec ps`: what runs where, once."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.admin_connection import Orchestrator, asks_orchestrator

if TYPE_CHECKING:
    from specdec.cli.admin_client import AdminClient
    from specdec.messages.cluster import ClusterStatus


@asks_orchestrator
def ps(
    orchestrator: Orchestrator,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show every server: what it is, how it is, what it has to do.

    SESSIONS and WAITING are all that a server has; OWN, ACCEPTED (draft tokens) and TOK/S are of the orchestrator that
    is asked, over the last ten seconds. A narrow terminal shows fewer columns, a pipe gets all.
    """
    from specdec.cli.cluster_table import as_json as status_as_json
    from specdec.cli.cluster_table import status_lines
    from specdec.cli.columns import terminal_width

    status = orchestrator.ask(_status)
    for line in [json.dumps(status_as_json(status))] if as_json else status_lines(status, terminal_width()):
        print(line)


async def _status(client: "AdminClient") -> "ClusterStatus":
    return await client.cluster_status()
