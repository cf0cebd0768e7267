"""`specdec bench`: what speculation brings through the whole path, and beside plain `transformers`. Starts the
processes, hands them to `specdec.bench`, and writes what was measured even where it ends early."""

import asyncio
import contextlib
import dataclasses
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, fail, told_in_one_line
from specdec.cli.until_signal import measure_until_signal

if TYPE_CHECKING:
    from specdec.bench.measure import Subjects
    from specdec.bench.peers import TransformersPeer
    from specdec.bench.plan import BenchPrompt, Lane
    from specdec.bench.records import Recording
    from specdec.cli.cluster_view import ClusterView

_WARM_UP_TOKENS = 8
_MODEL_WAIT_S = 60.0
_PEER_START_TIMEOUT_S = 1800.0
_TABLE_WIDTH = 160  # in a file or a pipe, where there is no terminal to ask


@dataclasses.dataclass(frozen=True)
class _Options:
    cluster: ClusterOptions
    lanes: Sequence["Lane"]
    prompts: Sequence["BenchPrompt"]
    max_new_tokens: int
    peers: bool
    peer_draft: str | None
    peer_dtype: str
    output_timeout_s: float


def bench(
    target: Annotated[str, typer.Option(help="The target model.")] = "smollm2-135m",
    proposer: Annotated[
        list[str] | None,
        typer.Option(help="PROPOSER[:DRAFT_MODEL[:QUANTIZATION]], several with commas or given again. Default: ngram."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="For proposers that name none, and for the peers.")] = None,
    quantization: Annotated[str, typer.Option(help="For proposers that name none: none, int8, int4.")] = "int8",
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, category, turns.")] = Path("bench/prompts/dev.jsonl"),
    take: Annotated[
        list[str] | None,
        typer.Option(help="CATEGORY=COUNT; other is every category not named. Default: code=8 and other=2."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each output.")] = 96,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Measure plain transformers in turn with ours.")] = False,
    peer_dtype: Annotated[str, typer.Option(help="Of the peers: auto measures which is fastest.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of the target's forward pass.")] = None,
    draft_threads: Annotated[int | None, typer.Option(help="Threads of the draft model's.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the processes' logs; a new one if not given.")] = None,
    output_timeout_s: Annotated[float, typer.Option("--output-timeout", help="Seconds for one output.")] = 600.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Measure speculation off and on, in turn, through the whole path."""
    from specdec.bench.peers import DTYPES, PeerError
    from specdec.bench.plan import PlanError, parse_lanes, parse_take, read_prompts, select_prompts

    with told_in_one_line():
        try:
            lanes = parse_lanes(proposer or ["ngram"], draft_model, quantization)
            selected = select_prompts(read_prompts(prompts), parse_take(take or ["code=8", "other=2"]))
        except PlanError as error:
            raise UsageError(str(error)) from None
        if peer_dtype not in DTYPES:
            raise UsageError(f"--peer-dtype is one of {', '.join(DTYPES)}")
        options = _Options(
            cluster=ClusterOptions(
                model=target,
                device=device,
                dtype=dtype,
                num_threads=threads,
                num_draft_threads=draft_threads,
                log_folder=log_folder,
            ),
            lanes=lanes,
            prompts=selected,
            max_new_tokens=max_new_tokens,
            peers=peers,
            peer_draft=draft_model or next((lane.draft_model for lane in lanes if lane.draft_model is not None), None),
            peer_dtype=peer_dtype,
            output_timeout_s=output_timeout_s,
        )
        recording = _new_recording(options, prompts)
        try:
            asyncio.run(measure_until_signal(_run(options, recording, verbose=verbose), recording))
        except PeerError as error:
            fail(str(error))
        finally:
            report = _finish(recording, json_path)
        _judge(recording, report)


def _new_recording(options: _Options, prompts: Path) -> "Recording":
    from specdec.bench.machine import describe_commit, describe_machine
    from specdec.bench.records import Recording

    cluster = options.cluster
    settings = {
        "target": cluster.model,
        "proposers": [lane.label for lane in options.lanes],
        "prompts_file": str(prompts),
        "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        "num_prompts": len(options.prompts),
        "max_new_tokens": options.max_new_tokens,
        "sampling": "greedy",
        "device": cluster.device,
        "dtype": cluster.dtype,
        "num_threads": cluster.num_threads,
        "num_draft_threads": cluster.num_draft_threads,
    }
    return Recording(describe_commit(Path(__file__).parent), describe_machine(), settings, options.lanes)


async def _run(options: _Options, recording: "Recording", *, verbose: bool) -> None:
    from specdec.bench.display import BenchView
    from specdec.bench.measure import measure_prompts, warm_up
    from specdec.cli.cluster_view import ClusterView

    view = ClusterView(verbose=verbose)
    async with contextlib.AsyncExitStack() as stack:
        subjects = await _start_subjects(options, recording, view, stack)
        await warm_up(subjects, options.prompts[0], _WARM_UP_TOKENS)
        num_steps = 1 + len(options.lanes) + len(recording.peer_modes)
        bar = stack.enter_context(BenchView(len(options.prompts), num_steps))
        await measure_prompts(subjects, options.prompts, options.max_new_tokens, recording, bar.step, bar.prompt)


async def _start_subjects(
    options: _Options, recording: "Recording", view: "ClusterView", stack: contextlib.AsyncExitStack
) -> "Subjects":
    """One verifier for all, a drafter and an orchestrator for each lane, so that lanes take turns on a prompt."""
    from specdec.bench.measure import Subjects
    from specdec.cli.client import GenerationClient
    from specdec.cli.lane_clusters import start_lanes

    peer = await _start_peer(options, recording, view, stack) if options.peers else None
    systems, pids = {}, list[int]()
    for lane, cluster in zip(
        options.lanes, await start_lanes(options.cluster, options.lanes, view, stack), strict=True
    ):
        pids += cluster.pids.values()
        client = await stack.enter_async_context(GenerationClient(cluster.endpoint, timeout_s=options.output_timeout_s))
        model = await client.wait_for_model(_MODEL_WAIT_S)
        recording.settings["numerics"] = None if model.numerics is None else dataclasses.asdict(model.numerics)
        systems[lane] = client.generate
    return Subjects(systems, peer, server_pids=pids, peer_pids=[] if peer is None else [peer.pid])


async def _start_peer(
    options: _Options, recording: "Recording", view: "ClusterView", stack: contextlib.AsyncExitStack
) -> "TransformersPeer":
    """First of all, and alone: it measures which dtype suits it."""
    from specdec.bench.peers import PeerOptions, TransformersPeer

    folder = options.cluster.log_folder or Path(tempfile.mkdtemp(prefix="specdec-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    peer = TransformersPeer(
        PeerOptions(
            target=options.cluster.model,
            draft=options.peer_draft,
            device=options.cluster.device or "auto",
            dtype=options.peer_dtype,
            log_path=folder / "transformers.log",
            start_timeout_s=_PEER_START_TIMEOUT_S,
            answer_timeout_s=options.output_timeout_s,
        )
    )
    view.say(f"starting plain transformers; log in {folder}")
    await stack.enter_async_context(peer)
    recording.settings["peers"] = dict(peer.settings)
    recording.peer_modes = peer.modes
    return peer


def _finish(recording: "Recording", json_path: Path | None) -> dict[str, Any]:
    """Writes and shows what there is. A run that measured nothing leaves an older file alone."""
    from rich.console import Console

    from specdec.bench.display import results_table
    from specdec.bench.report import build_report
    from specdec.bench.report_file import write_report

    report = build_report(recording)
    if json_path is not None and recording.prompts:
        write_report(json_path, report)
    if report["runs"]:
        console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
        console.print(results_table(report["runs"]))
    return report


def _judge(recording: "Recording", report: dict[str, Any]) -> None:
    """The exit code: speculation must not change a token, and an early end is no success."""
    if recording.ended_by:
        fail(recording.ended_by, EXIT_INTERRUPTED)
    num_mismatching = sum(run["mismatching_prompts"] for run in report["runs"])
    if num_mismatching:
        fail(f"{num_mismatching} outputs differ with speculation on", EXIT_FAILED)
