"""`specdec sessions` and `specdec kill`: what an orchestrator serves now, and the end of one of them."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.admin_connection import Orchestrator, asks_orchestrator
from specdec.errors import UnknownSessionError

if TYPE_CHECKING:
    from specdec.cli.admin_client import AdminClient
    from specdec.messages.cluster import SessionSummary

_PAGE_SIZE = 100


@asks_orchestrator
def sessions(
    orchestrator: Orchestrator,
    all_pages: Annotated[bool, typer.Option("--all", help=f"All of them, not the first {_PAGE_SIZE}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each session.")] = False,
) -> None:
    """List the sessions of one orchestrator, by their ids, without a word of their prompts."""
    from specdec.cli.cluster_table import SESSION_COLUMNS, session_row
    from specdec.cli.cluster_table import as_json as session_as_json
    from specdec.cli.columns import as_lines, terminal_width

    async def list_them(client: "AdminClient") -> tuple[list["SessionSummary"], bool]:
        found: list[SessionSummary] = []
        async for page, more in client.sessions(_PAGE_SIZE):
            found += page
            if not all_pages:
                return found, more
        return found, False

    found, more = orchestrator.ask(list_them)
    if as_json:
        for session in found:
            print(json.dumps(session_as_json(session)))
    else:
        for line in as_lines(SESSION_COLUMNS, [session_row(one) for one in found], terminal_width()):
            print(line)
    if more:
        typer.echo("there are more: --all lists them", err=True)


@asks_orchestrator
def kill(
    orchestrator: Orchestrator,
    session: Annotated[str, typer.Argument(help="Its id, as `specdec sessions` lists it.")],
) -> None:
    """End a session, or all samples of a request; its client is told CANCELLED, and it cannot be resumed."""

    async def end(client: "AdminClient") -> bool:
        return await client.kill(session)

    if not orchestrator.ask(end):
        raise UnknownSessionError(f"{orchestrator.endpoint} serves no session {session}")
    print(f"{session} is ended")
