"""`specdec`: the table of commands.

Imports nothing heavy, so that --help is there at once; each command imports what it needs when it runs.
"""

# ruff: noqa: E402 - what comes first is for a signal that comes while the rest is imported

import sys

from specdec.cli.early_end import end_in_order_while_importing

end_in_order_while_importing(sys.argv[1:])

from typing import Annotated

import typer

from specdec import __version__
from specdec.cli.bench import bench
from specdec.cli.bench_engine import bench_engine
from specdec.cli.bench_faults import bench_faults
from specdec.cli.bench_load import bench_load
from specdec.cli.bench_soak import bench_soak
from specdec.cli.certs import certs
from specdec.cli.demo import demo
from specdec.cli.drain import drain, undrain
from specdec.cli.generate import generate
from specdec.cli.ps import ps
from specdec.cli.role_command import RoleCommand
from specdec.cli.roles import drafter, orchestrator, verifier
from specdec.cli.sessions import kill, sessions
from specdec.cli.top import top
from specdec.cli.up import up

app = typer.Typer(
    name="specdec",
    help="Speculative decoding as microservices: drafters guess, a verifier decides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="And leave.")
    ] = False,
) -> None:
    """Speculative decoding as microservices: drafters guess, a verifier decides."""


for command in (up, generate, ps, top, sessions, drain, undrain, kill):
    app.command()(command)
for command in (demo, certs, bench, bench_load, bench_engine, bench_faults, bench_soak):
    app.command()(command)
for command in (verifier, drafter, orchestrator):
    app.command(cls=RoleCommand)(command)


if __name__ == "__main__":
    app()
