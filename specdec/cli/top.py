"""`specdec top`: what runs where, live. On a terminal one table that changes, else one after the other."""

import asyncio
import contextlib
import json
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.admin_connection import Orchestrator, asks_orchestrator

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specdec.cli.admin_client import AdminClient
    from specdec.messages.cluster import ClusterStatus


@asks_orchestrator
def top(
    orchestrator: Orchestrator,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    frames: Annotated[int | None, typer.Option(min=1, help="End after so many looks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each look.")] = False,
) -> None:
    """Watch every server, until Ctrl-C. Columns as in `specdec ps`, no more than fit."""

    async def watch(client: "AdminClient") -> None:
        watching = asyncio.create_task(_watch(client, interval_s, frames, as_json=as_json))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, watching.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    orchestrator.ask(watch)


async def _watch(client: "AdminClient", interval_s: float, frames: int | None, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    num_frames = 0
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        async with contextlib.aclosing(client.watch(interval_s)) as statuses:
            async for status in statuses:
                if live is not None:
                    live.update(_screen(status, console.width), refresh=True)
                else:
                    _print(status, as_json=as_json)
                num_frames += 1
                if num_frames == frames:
                    return


def _screen(status: "ClusterStatus", width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    from specdec.cli.cluster_table import ENDPOINT_COLUMNS, endpoint_row, remarks, style_of, summary_line
    from specdec.cli.columns import as_table
    from specdec.cli.terminal_text import printable

    rows = [endpoint_row(endpoint) for endpoint in status.endpoints]
    styles = [style_of(endpoint) for endpoint in status.endpoints]
    table = as_table(ENDPOINT_COLUMNS, rows, width=width, styles=styles)
    told = [Text(printable(line), style="red", overflow="ellipsis", no_wrap=True) for line in remarks(status)]
    return Group(Text(f"{summary_line(status)}  (Ctrl-C ends)", style="bold"), Text(), table, *told)


def _print(status: "ClusterStatus", *, as_json: bool) -> None:
    from specdec.cli.cluster_table import as_json as status_as_json
    from specdec.cli.cluster_table import status_lines, summary_line

    if as_json:
        print(json.dumps(status_as_json(status)), flush=True)
        return
    print(summary_line(status))
    for line in status_lines(status):
        print(line)
    print(flush=True)
