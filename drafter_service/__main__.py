"""`python -m drafter_service`: the same as `specdec drafter`, options and all."""

# ruff: noqa: E402 - what comes first is for a signal that comes while the rest is imported

from specdec.cli.early_end import end_in_order_while_importing

end_in_order_while_importing(["drafter"])

import typer

from specdec.cli.roles import drafter

if __name__ == "__main__":
    typer.run(drafter)
