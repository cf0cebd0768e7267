"""`specdec bench-faults`: hundreds of faults while sessions stream, and whether every promise was kept.
Starts the processes, hands them to the campaign, and writes what was noted even where it ends early."""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, fail, told_in_one_line
from specdec.cli.until_signal import measure_until_signal

if TYPE_CHECKING:
    from specdec.cli.cluster_view import ClusterView
    from specdec.cli.fault_campaign import CampaignPlan, CampaignRecording
    from specdec.cli.fault_system import FaultSystemOptions

_TABLE_WIDTH = 200
_MAX_SESSIONS = 64


def bench_faults(
    faults: Annotated[int, typer.Option(min=1, help="How many to inject.")] = 300,
    minutes: Annotated[float, typer.Option(min=0.1, help="After which no further fault begins.")] = 60.0,
    kinds: Annotated[
        str, typer.Option(help="Only kinds that begin so, as in verifier:,store:kill. Default: all.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the plan and the requests.")] = 0,
    sessions: Annotated[int, typer.Option(min=1, max=_MAX_SESSIONS, help="Streams at once.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each output.")] = 160,
    requests: Annotated[int, typer.Option(min=1, help="Different requests, asked in turn.")] = 48,
    verifiers: Annotated[int, typer.Option(min=2, help="Of equal numerics.")] = 3,
    drafters: Annotated[int, typer.Option(min=1)] = 3,
    orchestrators: Annotated[int, typer.Option(min=2, help="Replicas.")] = 2,
    durability: Annotated[str, typer.Option(help="relaxed or strict.")] = "relaxed",
    session_ttl_s: Annotated[float, typer.Option("--session-ttl", min=5, help="Seconds a record is kept.")] = 60.0,
    silence_s: Annotated[
        float, typer.Option("--silence", min=1, help="Seconds without a frame: client resumes.")
    ] = 12.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the processes' logs; a new one if not given.")] = None,
    target: Annotated[str, typer.Option(help="The synthetic target.")] = "synthetic:seed=7,forward_ms=80",
    draft: Annotated[
        str, typer.Option(help="The synthetic draft model; empty: drafters look up in the text.")
    ] = "synthetic:seed=7,acceptance=0.8",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Inject faults while sessions stream; exit code 1 where a promise was broken."""
    from specdec.bench.faults.kinds import find_kinds
    from specdec.bench.faults.requests import campaign_requests
    from specdec.bench.faults.schedule import plan_faults
    from specdec.bench.faults.stream import Patience

    with told_in_one_line():
        try:
            chosen = find_kinds(kinds)
        except ValueError as error:
            raise UsageError(str(error)) from None
        from specdec.cli.cluster_view import ClusterView
        from specdec.cli.fault_campaign import CampaignPlan, CampaignRecording
        from specdec.cli.fault_system import FaultSystemOptions

        plan = CampaignPlan(
            requests=campaign_requests(requests, max_new_tokens, seed),
            lanes=plan_faults(faults, chosen, seed),
            num_sessions=sessions,
            patience=Patience(silence_s=silence_s),
            session_ttl_s=session_ttl_s,
            limit_s=60 * minutes,
        )
        store_options = ("--session-ttl-s", str(session_ttl_s), "--durability", durability)
        system = FaultSystemOptions(
            model=target,
            draft_model=draft,
            log_folder=log_folder or Path(tempfile.mkdtemp(prefix="specdec-faults-")),
            num_verifiers=verifiers,
            num_drafters=drafters,
            num_orchestrators=orchestrators,
            orchestrator_arguments=store_options,
        )
        settings = {
            "num_faults": faults,
            "minutes": minutes,
            "kinds": [kind.name for kind in chosen],
            "seed": seed,
            "num_sessions": sessions,
            "max_new_tokens": max_new_tokens,
            "num_requests": requests,
            "durability": durability,
            "session_ttl_s": session_ttl_s,
            "silence_s": silence_s,
            "target": target,
            "draft": draft,
            "num_verifiers": verifiers,
            "num_drafters": drafters,
            "num_orchestrators": orchestrators,
        }
        recording = CampaignRecording()
        view = ClusterView(verbose=verbose)
        try:
            asyncio.run(measure_until_signal(_run(system, plan, recording, view), recording))
        finally:
            report = _finish(plan, recording, settings, json_path)
        _judge(report)


async def _run(
    options: "FaultSystemOptions", plan: "CampaignPlan", recording: "CampaignRecording", view: "ClusterView"
) -> None:
    from specdec.cli.fault_campaign import run_campaign
    from specdec.cli.fault_system import FaultSystem

    view.say(f"starting the system; logs in {options.log_folder}")
    async with FaultSystem(options, view) as system:
        await run_campaign(system, plan, recording, view.say)


def _finish(
    plan: "CampaignPlan", recording: "CampaignRecording", settings: dict[str, Any], json_path: Path | None
) -> dict[str, Any]:
    """Writes and shows what there is."""
    import sys

    from rich.console import Console

    from specdec.bench.faults.judge import judge
    from specdec.bench.faults.report import build_campaign_report, kind_table, promise_table, summary_lines
    from specdec.bench.machine import describe_commit, describe_machine
    from specdec.bench.report_file import write_report

    undisturbed = {output.number: output for output in recording.undisturbed}
    outputs = [output for output in recording.outputs if output.number in undisturbed]
    requests = {request.number: request for request in plan.requests}
    promises = judge(requests, undisturbed, outputs, recording.faults, recording.left_over)
    report = {
        "commit": describe_commit(Path(__file__).parent),
        "machine": describe_machine(),
        "settings": settings,
        "complete": recording.complete,
        "ended_by": recording.ended_by,
        **build_campaign_report(recording.faults, outputs, promises, time.time() - time.monotonic()),
    }
    if json_path is not None and recording.faults:
        write_report(json_path, report)
    console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
    console.print(kind_table(report["kinds"]))
    console.print(promise_table(promises))
    for line in summary_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    return report


def _judge(report: dict[str, Any]) -> None:
    if report["ended_by"]:
        fail(report["ended_by"], EXIT_INTERRUPTED)
    broken = [promise for promise in report["promises"] if promise["num_broken"]]
    if broken:
        fail("broken: " + ", ".join(f"{one['name']} {one['num_broken']}" for one in broken), EXIT_FAILED)
