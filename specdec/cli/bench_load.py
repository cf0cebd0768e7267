"""`specdec bench-load`: many streams at once, speculation off and on, against what the forward alone would allow.
Starts the processes, hands them to `specdec.bench`, and writes what was measured even where it ends early."""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED, UsageError, fail, told_in_one_line
from specdec.cli.until_signal import measure_until_signal

if TYPE_CHECKING:
    from specdec.bench.load_figures import ForwardTime
    from specdec.bench.load_plan import LoadPlan
    from specdec.bench.load_report import LoadRecording
    from specdec.bench.load_run import Generate, LoadSubject
    from specdec.bench.plan import Lane
    from specdec.cli.cluster_view import ClusterView
    from specdec.params import Prompt

_MODEL_WAIT_S = 60.0
_TABLE_WIDTH = 272  # in a file or a pipe, where there is no terminal to ask
_PROMPTS_BEFORE_REPEAT = 512
WARM_UP, PROFILED = -1, -2
"""Repetitions that are not measured."""


@dataclasses.dataclass(frozen=True)
class _Options:
    cluster: ClusterOptions
    plan: "LoadPlan"
    prompts: Path
    num_prompt_tokens: int | None
    output_timeout_s: float
    profile: Path | None
    profiler: str
    forward_time: "ForwardTime | None"


def bench_load(
    target: Annotated[str, typer.Option(help="The target model, synthetic:... included.")] = "smollm2-135m",
    proposer: Annotated[
        list[str] | None,
        typer.Option(help="PROPOSER[:DRAFT_MODEL[:QUANTIZATION]], several with commas or given again. Default: ngram."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="For proposers that name none.")] = None,
    quantization: Annotated[str, typer.Option(help="For proposers that name none: none, int8, int4.")] = "int8",
    drafters: Annotated[int, typer.Option(help="Drafters of each proposer.")] = 1,
    sessions: Annotated[str, typer.Option(help="Numbers of streams at once, with commas.")] = "1,2,4,8,16",
    repetitions: Annotated[int, typer.Option(min=1, help="Of everything, in swapped order.")] = 3,
    outputs: Annotated[int, typer.Option(min=1, help="Of each stream, one after the other.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each output; none ends before.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy. Else sampled, each stream by its seed.")] = 0.0,
    prompts: Annotated[Path, typer.Option(help="JSON lines: id, category, turns.")] = Path("bench/prompts/dev.jsonl"),
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Made-up prompts of so many tokens instead.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    verifier_profile: Annotated[
        Path | None, typer.Option(help="Folder for a py-spy profile of the verifier at most streams, in extra runs.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads of the target's forward pass.")] = None,
    draft_threads: Annotated[int | None, typer.Option(help="Threads of the draft model's.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the processes' logs; a new one if not given.")] = None,
    output_timeout_s: Annotated[float, typer.Option("--output-timeout", help="Seconds for one output.")] = 600.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Measure many streams at once, speculation off and on in turn."""
    from specdec.bench.load_plan import LoadPlan, parse_stream_counts
    from specdec.bench.plan import PlanError, parse_lanes
    from specdec.bench.profile import ProfilerError, find_profiler
    from specdec.model.synthetic_options import is_synthetic, parse_synthetic

    with told_in_one_line():
        try:
            plan = LoadPlan(
                lanes=parse_lanes(proposer or ["ngram"], draft_model, quantization),
                stream_counts=parse_stream_counts(sessions),
                num_repetitions=repetitions,
                num_outputs=outputs,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
            )
            profiler = find_profiler() if verifier_profile is not None else ""
        except (PlanError, ProfilerError) as error:
            raise UsageError(str(error)) from None
        times = parse_synthetic(target).times if is_synthetic(target) else None
        room = ("--max-sessions", str(2 * max(plan.stream_counts)))  # an output's end may still be tidied up
        options = _Options(
            cluster=ClusterOptions(
                model=target,
                num_drafters=drafters,
                device=device,
                dtype=dtype,
                num_threads=threads,
                num_draft_threads=draft_threads,
                log_folder=log_folder,
                extra_arguments={"verifier": room, "drafter": room, "orchestrator": room},
            ),
            plan=plan,
            prompts=prompts,
            num_prompt_tokens=prompt_tokens,
            output_timeout_s=output_timeout_s,
            profile=verifier_profile,
            profiler=profiler,
            forward_time=None if times is None else times.expected_s,
        )
        recording = _new_recording(options)
        if verifier_profile is not None:
            verifier_profile.mkdir(parents=True, exist_ok=True)
        try:
            asyncio.run(measure_until_signal(_run(options, recording, verbose=verbose), recording))
        except ProfilerError as error:
            fail(str(error))
        finally:
            report = _finish(options, recording, json_path)
        _judge(report)


def _new_recording(options: _Options) -> "LoadRecording":
    from specdec.bench.load_report import LoadRecording
    from specdec.bench.machine import describe_commit, describe_machine

    plan, cluster = options.plan, options.cluster
    settings = {
        "target": cluster.model,
        "proposers": [lane.label for lane in plan.lanes],
        "num_drafters": cluster.num_drafters,
        "stream_counts": list(plan.stream_counts),
        "num_repetitions": plan.num_repetitions,
        "num_outputs": plan.num_outputs,
        "max_new_tokens": plan.max_new_tokens,
        "temperature": plan.temperature,
        "prompts_file": None if options.num_prompt_tokens else str(options.prompts),
        "num_prompt_tokens": options.num_prompt_tokens,
        "device": cluster.device,
        "dtype": cluster.dtype,
        "num_threads": cluster.num_threads,
        "num_draft_threads": cluster.num_draft_threads,
    }
    return LoadRecording(describe_commit(Path(__file__).parent), describe_machine(), settings)


async def _run(options: _Options, recording: "LoadRecording", *, verbose: bool) -> None:
    from specdec.bench.load_display import describe_cell
    from specdec.bench.load_run import run_cell
    from specdec.cli.cluster_view import ClusterView

    view = ClusterView(verbose=verbose)
    async with contextlib.AsyncExitStack() as stack:
        subjects, prompts = await _start_subjects(options, recording, view, stack)
        await _warm_up(options.plan, subjects, prompts)
        for cell in options.plan.cells():
            record = await run_cell(subjects[cell.lane or options.plan.lanes[0]], options.plan, cell, prompts)
            recording.cells.append(record)
            view.say(describe_cell(record))
        if options.profile is not None:
            await _profile(options, options.profile, subjects, prompts, recording)
            view.say(f"profiles of the verifier in {options.profile}")


async def _start_subjects(
    options: _Options, recording: "LoadRecording", view: "ClusterView", stack: contextlib.AsyncExitStack
) -> tuple[dict["Lane", "LoadSubject"], Sequence["Prompt"]]:
    from specdec.bench.load_plan import chat_prompts, made_up_prompts
    from specdec.bench.load_run import LoadSubject
    from specdec.bench.plan import read_prompts
    from specdec.cli.client import GenerationClient
    from specdec.cli.lane_clusters import start_lanes

    lanes = options.plan.lanes
    prompts = chat_prompts(read_prompts(options.prompts)) if options.num_prompt_tokens is None else []
    clusters = await start_lanes(options.cluster, lanes, view, stack)
    verifier_pid = clusters[0].pids["verifier"]
    verifier_metrics = clusters[0].metrics_endpoints["verifier"]
    subjects = {}
    for lane, cluster in zip(lanes, clusters, strict=True):
        async with GenerationClient(cluster.endpoint) as client:
            model = await client.wait_for_model(_MODEL_WAIT_S)
        recording.settings["numerics"] = None if model.numerics is None else dataclasses.asdict(model.numerics)
        if options.num_prompt_tokens is not None:
            prompts = made_up_prompts(_PROMPTS_BEFORE_REPEAT, options.num_prompt_tokens, model.vocabulary_size)
        subjects[lane] = LoadSubject(
            connect=_connector(cluster.endpoint, options.output_timeout_s),
            pids={**cluster.pids, "verifier": verifier_pid},
            metrics_endpoints={**cluster.metrics_endpoints, "verifier": verifier_metrics},
        )
    return subjects, prompts


def _connector(endpoint: str, timeout_s: float) -> Callable[[str], AbstractAsyncContextManager["Generate"]]:
    @contextlib.asynccontextmanager
    async def connect(tenant: str) -> AsyncIterator["Generate"]:
        from specdec.cli.client import GenerationClient

        async with GenerationClient(endpoint, timeout_s=timeout_s, tenant=tenant) as client:
            await client.status()  # the first call connects, and that is no part of a first token's time
            yield client.generate

    return connect


async def _warm_up(plan: "LoadPlan", subjects: Mapping["Lane", "LoadSubject"], prompts: Sequence["Prompt"]) -> None:
    """Two streams each way, not recorded: first calls allocate, and drafters connect and measure."""
    from specdec.bench.load_plan import LoadCell
    from specdec.bench.load_run import run_cell

    for lane in (None, *plan.lanes):
        await run_cell(subjects[lane or plan.lanes[0]], plan, LoadCell(WARM_UP, 2, lane), prompts)


async def _profile(
    options: _Options,
    folder: Path,
    subjects: Mapping["Lane", "LoadSubject"],
    prompts: Sequence["Prompt"],
    recording: "LoadRecording",
) -> None:
    """Each way once more at the largest number of streams, apart from the runs that are measured."""
    from specdec.bench.load_plan import LoadCell
    from specdec.bench.load_run import run_cell
    from specdec.bench.profile import profiled, read_profile

    for index, lane in enumerate((None, *options.plan.lanes)):
        subject = subjects[lane or options.plan.lanes[0]]
        cell = LoadCell(PROFILED, max(options.plan.stream_counts), lane)
        path = folder / f"{index}-{cell.label.partition(':')[0]}.raw"
        async with profiled(options.profiler, subject.pids["verifier"], path):
            record = await run_cell(subject, options.plan, cell, prompts)
        samples = read_profile(path)
        recording.profiles[cell.label] = {"cpu_s": dict(record.cpu_s), "elapsed_s": record.elapsed_s, **samples}


def _finish(options: _Options, recording: "LoadRecording", json_path: Path | None) -> dict[str, Any]:
    """Writes and shows what there is. A run that measured nothing leaves an older file alone."""
    from rich.console import Console

    from specdec.bench.load_display import load_table
    from specdec.bench.load_report import build_load_report
    from specdec.bench.report_file import write_report

    report = build_load_report(recording, options.forward_time)
    if json_path is not None and recording.cells:
        write_report(json_path, report)
    if report["runs"]:
        console = Console() if sys.stdout.isatty() else Console(width=_TABLE_WIDTH)
        console.print(load_table(report["runs"]))
    return report


def _judge(report: dict[str, Any]) -> None:
    """The exit code: no token may differ and no output fail, and an early end is no success."""
    if report["ended_by"]:
        fail(report["ended_by"], EXIT_INTERRUPTED)
    if report["num_mismatching_outputs"]:
        fail(f"{report['num_mismatching_outputs']} outputs differ from the target's own", EXIT_FAILED)
    if report["num_errors"]:
        fail(f"{report['num_errors']} outputs failed: {report['errors'][0]}", EXIT_FAILED)
