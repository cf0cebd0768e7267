"""`specdec up`: every role on this machine, until Ctrl-C. Knows signals and when a death ends everything."""

import asyncio
import contextlib
import errno
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.certs import AUTHORITY
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.failures import UsageError, told_in_one_line
from specdec.cli.generate import DEFAULT_ENDPOINT
from specdec.cli.processes import LocalCluster
from specdec.cli.roles import require_loopback

if TYPE_CHECKING:
    from specdec.cli.cluster_view import ClusterView

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(
    model: Annotated[
        str, typer.Option(help="Target: named model, hub id, folder, .gguf file or synthetic:...")
    ] = "smollm2-135m",
    proposer: Annotated[str, typer.Option(help="How to guess: ngram, draft_model, stacked or none.")] = "ngram",
    draft_model: Annotated[str | None, typer.Option(help="For draft_model and stacked.")] = None,
    quantization: Annotated[str | None, typer.Option(help="The draft model's weights: none, int8, int4.")] = None,
    drafters: Annotated[int, typer.Option(help="How many drafters.")] = 1,
    listen: Annotated[str, typer.Option(help="Where clients connect.")] = DEFAULT_ENDPOINT,
    insecure_bind: Annotated[bool, typer.Option("--insecure-bind", help="Allow more than loopback there.")] = False,
    certificates: Annotated[
        Path | None, typer.Option("--certs", help="TLS with what `specdec certs` wrote to this folder.")
    ] = None,
    auth_tokens: Annotated[Path | None, typer.Option(help="JSON file of the clients' bearer tokens.")] = None,
    redis: Annotated[
        str,
        typer.Option(envvar="SPECDEC_ORCHESTRATOR_REDIS", help="embedded, or a URL of Redis, Sentinels or a cluster."),
    ] = "embedded",
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the target's forward pass.")] = None,
    draft_threads: Annotated[int | None, typer.Option(help="Threads of the draft model's.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the roles' logs; a new one if not given.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Start every role on this machine; Ctrl-C stops them all."""
    with told_in_one_line():
        try:
            options = ClusterOptions(
                model=model,
                proposer=proposer,
                draft_model=draft_model,
                quantization=quantization,
                num_drafters=drafters,
                listen=listen,
                insecure_bind=insecure_bind,
                certificates=certificates,
                redis=redis,
                device=device,
                dtype=dtype,
                num_threads=threads,
                num_draft_threads=draft_threads,
                log_folder=log_folder,
                extra_arguments={} if auth_tokens is None else {"orchestrator": ("--auth-tokens", str(auth_tokens))},
            ).validated()
        except ValueError as error:
            raise UsageError(str(error)) from None
        if auth_tokens is not None and not auth_tokens.is_file():
            raise UsageError(f"--auth-tokens: there is no file {auth_tokens}")
        _require_free(listen)
        require_loopback("--listen", listen, insecure_bind=insecure_bind or certificates is not None)
        asyncio.run(_run(options, verbose=verbose))


async def _run(options: ClusterOptions, *, verbose: bool) -> None:
    from specdec.cli.cluster_view import ClusterView

    view = ClusterView(verbose=verbose)
    cluster = LocalCluster(options, on_progress=view.progress, on_line=view.log_line)
    view.say(f"starting {options.model} with proposer {options.proposer}; logs in {cluster.log_folder}")
    life = asyncio.create_task(_live(cluster, view))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if life.cancelling():
            cluster.kill()  # asked twice: no grace
        else:
            life.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await life


async def _live(cluster: LocalCluster, view: "ClusterView") -> None:
    """Until it is cancelled, or the verifier or the orchestrator dies. A drafter's death costs speed alone."""
    certificates = cluster.options.certificates
    trust = "" if certificates is None else f" --tls-ca {certificates / AUTHORITY}.crt"
    async with cluster:
        view.say(
            f'serving at {cluster.endpoint}; try: specdec generate "Hello" --endpoint {cluster.endpoint}{trust}', "bold"
        )
        async for death in cluster.deaths():
            if not death.name.startswith("drafter"):
                raise death
            view.say(f"{death}: going on without it", "yellow")


def _require_free(endpoint: str) -> None:
    """Says that a port is taken before minutes go into loading models."""
    from specdec.config import parse_endpoint

    try:
        host, port = parse_endpoint(endpoint)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(error.errno, f"{endpoint} is in use by another program") from None
            raise OSError(error.errno, f"cannot listen at {endpoint}: {error.strerror or error}") from None
