"""`python -m drafter_service`: the same as `specdec drafter`, options and all."""

import typer

from specdec.cli.roles import drafter

if __name__ == "__main__":
    typer.run(drafter)
