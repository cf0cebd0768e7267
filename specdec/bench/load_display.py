"""What a person sees of a load benchmark: a line for each cell as it ends, a table at the end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from specdec.bench.load_figures import cell_figures
from specdec.bench.load_run import CellRecord

_COLUMNS: Mapping[str, Callable[[dict[str, Any]], float | None]] = {
    "tok/s": lambda run: run["tokens_per_s"],
    "steady": lambda run: run["steady_tokens_per_s"],
    "speed-up": lambda run: run["over_target_only"],
    "arithmetic": lambda run: run["arithmetic_tokens_per_s"],
    "predicted": lambda run: run["predicted_tokens_per_s"],
    "first p50": lambda run: run["first_token_ms"]["p50"],
    "first p99": lambda run: run["first_token_ms"]["p99"],
    "token ms": lambda run: run["inter_token_ms"]["p50"],
    "rounds/s": lambda run: run["rounds_per_s"],
    "tok/round": lambda run: run["tokens_per_round"],
    "drafted": lambda run: run["share_of_rounds_with_draft"],
    "draft": lambda run: run["draft_tokens_per_draft"],
    "budget": lambda run: run["draft_budget"],
    "accepted": lambda run: run["acceptance_rate"],
    "steps/s": lambda run: run["verifier"]["steps_per_s"],
    "rows": lambda run: run["verifier"]["rows_per_step"],
    "forward": lambda run: run["verifier"]["forward_ms"],
    "beside": lambda run: run["verifier"]["beside_forward_ms"],
}


def load_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One row for each number of streams and way. Times are milliseconds."""
    table = Table()
    table.add_column("streams", justify="right")
    table.add_column("way", overflow="fold", min_width=11, max_width=24)
    for heading in ("differ", *_COLUMNS):
        table.add_column(heading, justify="right")
    table.add_column("CPU share", min_width=20)
    for run in runs:
        shares = ", ".join(f"{name} {seconds / run['elapsed_s']:.2f}" for name, seconds in _by_role(run["cpu_s"]))
        table.add_row(
            f"{run['num_streams']:.0f}",
            run["label"],
            f"{run['num_mismatching_outputs']}",
            *(_number(read(run)) for read in _COLUMNS.values()),
            shares,
        )
    return table


def describe_cell(record: CellRecord) -> str:
    """One line."""
    measured = cell_figures(record, None)
    errors = f", {len(record.errors)} failed: {record.errors[0]}" if record.errors else ""
    return (
        f"{record.cell.num_streams} streams, {record.cell.label}, repetition {record.cell.repetition}: "
        f"{measured['tokens_per_s']:.1f} tokens/s{errors}"
    )


def _by_role(cpu_s: dict[str, float]) -> list[tuple[str, float]]:
    """Drafters together."""
    summed: dict[str, float] = {}
    for name, seconds in cpu_s.items():
        role = name.partition("-")[0]
        summed[role] = summed.get(role, 0.0) + seconds
    return sorted(summed.items())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
