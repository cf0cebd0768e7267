"""`specdec bench-soak`: a mixed load for a long time, with kills, and whether any process grows."""

import asyncio
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED, fail, told_in_one_line
from specdec.cli.until_signal import measure_until_signal

if TYPE_CHECKING:
    from specdec.cli.cluster_view import ClusterView
    from specdec.cli.fault_system import FaultSystemOptions
    from specdec.cli.soak_run import SoakPlan, SoakRecording

_TABLE_WIDTH = 140


def bench_soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Requests at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the load and the kills.")] = 0,
    session_ttl_s: Annotated[float, typer.Option("--session-ttl", min=5, help="Seconds a record is kept.")] = 60.0,
    target: Annotated[
        str, typer.Option(help="The synthetic target.")
    ] = "synthetic:seed=7,forward_ms=50,end_rate=0.002",
    draft: Annotated[
        str, typer.Option(help="The synthetic draft model; empty: drafters look up in the text.")
    ] = "synthetic:seed=7,acceptance=0.8",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the processes' logs; a new one if not given.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Load a system for long, with cancels and kills; exit code 1 where a process grows or something is left over."""
    with told_in_one_line():
        from specdec.cli.cluster_view import ClusterView
        from specdec.cli.fault_system import FaultSystemOptions
        from specdec.cli.soak_run import SoakPlan, SoakRecording

        options = FaultSystemOptions(
            model=target,
            draft_model=draft,
            log_folder=log_folder or Path(tempfile.mkdtemp(prefix="specdec-soak-")),
            num_verifiers=2,
            num_drafters=2,
            orchestrator_arguments=("--session-ttl-s", str(session_ttl_s)),
        )
        plan = SoakPlan(60 * minutes, clients, seed, session_ttl_s)
        settings = {**dataclasses.asdict(plan), "target": target, "draft": draft}
        recording = SoakRecording()
        view = ClusterView(verbose=verbose)
        try:
            asyncio.run(measure_until_signal(_run(options, plan, recording, view), recording))
        finally:
            report = _finish(recording, settings, json_path)
        if report["ended_by"]:
            fail(report["ended_by"], EXIT_INTERRUPTED)
        if not (report["flat"] and report["clean"]):
            fail(f"grown: {report['grown']}; defects: {report['num_defects']}; {recording.left_over}", EXIT_FAILED)


async def _run(
    options: "FaultSystemOptions", plan: "SoakPlan", recording: "SoakRecording", view: "ClusterView"
) -> None:
    from specdec.cli.fault_system import FaultSystem
    from specdec.cli.soak_run import run_soak

    view.say(f"starting the system; logs in {options.log_folder}")
    async with FaultSystem(options, view) as system:
        await run_soak(system, plan, recording, view.say)


def _finish(recording: "SoakRecording", settings: dict[str, Any], json_path: Path | None) -> dict[str, Any]:
    """Writes and shows what there is."""
    from rich.console import Console

    from specdec.bench.faults.soak_report import build_soak_report, growth_table
    from specdec.bench.machine import describe_commit, describe_machine
    from specdec.bench.report_file import write_report
    from specdec.cli.fault_system import CLIENT

    found = build_soak_report(
        recording.samples, recording.endings, recording.defects, recording.left_over, not_judged=CLIENT
    )
    report = {
        "commit": describe_commit(Path(__file__).parent),
        "machine": describe_machine(),
        "settings": settings,
        "complete": recording.complete,
        "ended_by": recording.ended_by,
        "restarts": dict(recording.restarts),
        **found,
    }
    if json_path is not None and recording.samples:
        write_report(json_path, report)
    console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
    console.print(growth_table(report["growth"]))
    console.print(f"requests: {report['requests']}; restarts: {report['restarts']}; left over: {report['left_over']}")
    return report
