"""`python -m verifier_service`: the same as `specdec verifier`, options and all."""

import typer

from specdec.cli.roles import verifier

if __name__ == "__main__":
    typer.run(verifier)
