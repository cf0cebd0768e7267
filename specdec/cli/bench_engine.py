"""`specdec bench-engine`: what the verifier's engine costs beside the model's forward, in one process without a wire.
The measuring itself is the verifier's own, imported by name: shared code imports no service."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli.failures import UsageError, fail, told_in_one_line
from specdec.cli.roles import role_module

_TABLE_WIDTH = 120


def bench_engine(
    model: Annotated[str, typer.Option(help="Named model, hub id, folder, .gguf file or synthetic:...")] = (
        "smollm2-135m"
    ),
    sessions: Annotated[str, typer.Option(help="Numbers of sessions at once, with commas.")] = "1,4,16",
    context: Annotated[int, typer.Option(min=32, help="Prompt tokens of each session.")] = 200,
    long_prompt: Annotated[int, typer.Option(min=64, help="Of the prompt that a short request meets.")] = 4000,
    steps: Annotated[int, typer.Option(min=3, help="Steps measured at each number of sessions.")] = 30,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of one forward pass.")] = None,
) -> None:
    """Measure the engine beside the model's forward."""
    from rich.console import Console

    from specdec.bench.load_plan import parse_stream_counts
    from specdec.bench.machine import describe_commit, describe_machine
    from specdec.bench.plan import PlanError
    from specdec.bench.report_file import write_report

    with told_in_one_line():
        try:
            counts = parse_stream_counts(sessions)
        except PlanError as error:
            raise UsageError(str(error)) from None
        measuring = role_module("verifier", "bench")
        options = {
            "model": model,
            "device": device,
            "dtype": dtype,
            "num_threads": threads,
            "session_counts": counts,
            "context": context,
            "long_prompt": long_prompt,
            "num_steps": steps,
        }
        report: dict[str, Any] = {
            "commit": describe_commit(Path(__file__).parent),
            "machine": describe_machine(),
            "settings": options,
        }
        console = Console(stderr=True, highlight=False)
        report.update(measuring.measure_engine(measuring.EngineBenchOptions(**options), console.print))
        if json_path is not None:
            write_report(json_path, report)
        _show(report)
        if not report["self_check"]["passed"]:
            fail(f"logits depend on their batch on this device: {report['self_check']['detail']}")


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    table = Table()
    columns = ("num_sessions", "draft_tokens", "rows_per_step", "step_ms", "forward_ms", "plain_forward_ms")
    for heading in (*columns, "beside_forward_ms", "share"):
        table.add_column(heading.replace("_", " "), justify="right")
    for run in report["steps"]:
        cells = [f"{run[column]:.4g}" for column in (*columns, "beside_forward_ms")]
        table.add_row(*cells, f"{run['share_beside_forward']:.1%}")
    console.print(table)
    forwards = ", ".join(f"{rows}: {time_ms:.2f}" for rows, time_ms in report["forward_ms_by_rows"].items())
    console.print(f"forward, ms by rows: {forwards}", soft_wrap=True)
    cache, first = report["cache"], report["first_token"]
    console.print(
        f"cache, bytes of a position: {cache['held_bytes_per_token']:.0f}, by the model's shape "
        f"{cache['arithmetic_bytes_per_token']}",
        soft_wrap=True,
    )
    console.print(
        f"first token of a short request: {first['idle']['num_steps']} steps on an idle engine, "
        f"{first['beside_long_prompt']['num_steps']} beside a prompt of {first['long_prompt_tokens']} tokens",
        soft_wrap=True,
    )
