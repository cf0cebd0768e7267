"""`python -m orchestrator`: the same as `specdec orchestrator`, options and all."""

import typer

from specdec.cli.roles import orchestrator

if __name__ == "__main__":
    typer.run(orchestrator)
