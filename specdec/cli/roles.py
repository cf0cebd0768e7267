"""`specdec verifier|drafter|orchestrator`: one role in this process.

Options left out come from the environment, then from the defaults of specdec.config. The role's own package is imported
by name when it runs: shared code imports no service.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.failures import UsageError, told_in_one_line
from specdec.role_main import run_role

if TYPE_CHECKING:
    from pydantic import ValidationError

OPENMP_SPIN_COUNT = "20000"
"""Read by OpenMP when torch is loaded: a thread with nothing to do spins this often, about 0.3 ms, before it sleeps.

Nearly as quick as the default of 300,000 on idle cores, and it takes less from the processes beside it; threads that
sleep at once double the time of a small model's forward. docs/adr/0006 has the figures."""

_PACKAGES = {"verifier": "verifier_service", "drafter": "drafter_service", "orchestrator": "orchestrator"}
_SETTINGS = {"verifier": "VerifierSettings", "drafter": "DrafterSettings", "orchestrator": "OrchestratorSettings"}

Listen = Annotated[str | None, typer.Option(help="Where gRPC is served; port 0 takes a free one.")]
Metrics = Annotated[str | None, typer.Option(help="Where /metrics is served over HTTP.")]
InsecureBind = Annotated[
    bool | None, typer.Option("--insecure-bind/--loopback-only", help="Allow addresses that other machines reach.")
]
TlsCert = Annotated[Path | None, typer.Option(help="This role's certificate, in PEM.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its private key, in PEM.")]
TlsCa = Annotated[Path | None, typer.Option(help="The authorities of the other roles' certificates, in PEM.")]
Reflection = Annotated[bool | None, typer.Option(help="Tell tools what the services look like.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
DrainGraceS = Annotated[float | None, typer.Option(help="Seconds for open streams after SIGTERM.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option(help="Threads of one forward pass.")]
CacheDir = Annotated[str | None, typer.Option(help="Where prepared models are kept.")]


def verifier(
    model: Annotated[str | None, typer.Option(help="Named model, hub id, folder, .gguf file or synthetic:...")] = None,
    listen: Listen = None,
    metrics: Metrics = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    cache_dir: CacheDir = None,
    max_sessions: Annotated[int | None, typer.Option(help="Sessions that run at one time.")] = None,
    max_waiting_sessions: Annotated[int | None, typer.Option(help="Sessions that may wait.")] = None,
    kv_cache_mib: Annotated[int | None, typer.Option(help="Memory for keys and values of all sessions.")] = None,
    prefix_caching: Annotated[bool | None, typer.Option(help="Compute prompts that begin alike once.")] = None,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Largest draft budget of a session.")] = None,
    draft_wait_ms: Annotated[float | None, typer.Option(help="Longest wait for an attached drafter.")] = None,
    max_step_rows: Annotated[int | None, typer.Option(help="Rows of one forward pass; 64 on a CPU.")] = None,
    default_max_new_tokens: Annotated[int | None, typer.Option(help="Output limit of requests that give none.")] = None,
    kept_tokens_grace_s: Annotated[float | None, typer.Option(help="Seconds that a lost owner's tokens stay.")] = None,
    max_verify_streams_per_peer: Annotated[int | None, typer.Option(help="Drafters' streams of one address.")] = None,
    max_attachments_per_stream: Annotated[int | None, typer.Option(help="Sessions of one drafter.")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    reflection: Reflection = None,
    insecure_bind: InsecureBind = None,
    log_level: LogLevel = None,
    drain_grace_s: DrainGraceS = None,
) -> None:
    """Run a verifier: the target model, which alone decides tokens."""
    _serve("verifier", locals())


def drafter(
    proposer: Annotated[str | None, typer.Option(help="draft_model, ngram or stacked.")] = None,
    model: Annotated[str | None, typer.Option(help="The draft model.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Its weights: none, int8 or int4.")] = None,
    listen: Listen = None,
    metrics: Metrics = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    cache_dir: CacheDir = None,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Longest draft.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Attached sessions.")] = None,
    niceness: Annotated[int | None, typer.Option(help="Added to the process's nice value.")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    reflection: Reflection = None,
    insecure_bind: InsecureBind = None,
    log_level: LogLevel = None,
    drain_grace_s: DrainGraceS = None,
) -> None:
    """Run a drafter: it guesses, and is checked."""
    _serve("drafter", locals())


def orchestrator(
    listen: Listen = None,
    metrics: Metrics = None,
    verifiers: Annotated[str | None, typer.Option(help="Where they are: host:port,host:port")] = None,
    drafters: Annotated[str | None, typer.Option(help="The same for drafters.")] = None,
    redis: Annotated[str | None, typer.Option(help="embedded, or a URL of Redis, Sentinels or a cluster.")] = None,
    durability: Annotated[str | None, typer.Option(help="relaxed or strict.")] = None,
    session_ttl_s: Annotated[float | None, typer.Option(help="A record lives this long after its last change.")] = None,
    abandoned_ttl_s: Annotated[float | None, typer.Option(help="One without an owner may be resumed so long.")] = None,
    token_key_file: Annotated[Path | None, typer.Option(help="Keys that seal prompts and outputs in it.")] = None,
    store_tokens: Annotated[bool | None, typer.Option(help="Keep prompts and outputs in the record.")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="Sessions of an owner that is silent so long are abandoned.")
    ] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Sessions served at one time.")] = None,
    resume_reserve: Annotated[int | None, typer.Option(help="Sessions beyond it that only Resume may begin.")] = None,
    slow_reader_timeout_s: Annotated[float | None, typer.Option(help="Longest pause of a client's reading.")] = None,
    tenant_requests_per_s: Annotated[float | None, typer.Option(help="Requests of each tenant per second.")] = None,
    tenant_request_burst: Annotated[int | None, typer.Option(help="Requests that may come at once.")] = None,
    tenant_tokens_per_s: Annotated[float | None, typer.Option(help="Tokens of each tenant per second.")] = None,
    tenant_token_burst: Annotated[int | None, typer.Option(help="Tokens that may be served at once.")] = None,
    tenant_max_streams: Annotated[int | None, typer.Option(help="Sessions of each tenant at one time.")] = None,
    tenant_limits: Annotated[Path | None, typer.Option(help="TOML or JSON file of tenants that differ.")] = None,
    failover_timeout_s: Annotated[float | None, typer.Option(help="Longest search for another verifier.")] = None,
    health_interval_s: Annotated[float | None, typer.Option(help="Pause between two looks at each server.")] = None,
    edge_tls_cert: Annotated[Path | None, typer.Option(help="What clients see; --tls-cert if not given.")] = None,
    edge_tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    auth_tokens: Annotated[Path | None, typer.Option(help="JSON file of the clients' bearer tokens.")] = None,
    auth_jwks: Annotated[Path | None, typer.Option(help="JSON Web Key Set of those who issue JWTs.")] = None,
    auth_jwt_issuer: Annotated[str | None, typer.Option(help="What iss of a JWT must be.")] = None,
    auth_jwt_audience: Annotated[str | None, typer.Option(help="What aud of a JWT must hold.")] = None,
    auth_jwt_tenant_claim: Annotated[str | None, typer.Option(help="The claim that names the tenant.")] = None,
    auth_jwt_leeway_s: Annotated[
        float | None, typer.Option(help="How far the issuer's clock may be from ours.")
    ] = None,
    max_streams_per_peer: Annotated[int | None, typer.Option(help="Calls open at one time of one address.")] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    reflection: Reflection = None,
    insecure_bind: InsecureBind = None,
    log_level: LogLevel = None,
    drain_grace_s: DrainGraceS = None,
) -> None:
    """Run an orchestrator: what clients talk to."""
    _serve("orchestrator", locals())


def _serve(role: str, options: dict[str, Any]) -> None:
    with told_in_one_line():
        settings = read_settings(role, options)
        encrypted = (settings.edge_tls if role == "orchestrator" else settings.tls) is not None
        require_loopback("--listen", settings.listen, insecure_bind=settings.insecure_bind or encrypted)
        require_loopback("--metrics", settings.metrics, insecure_bind=settings.insecure_bind)
        with _names_missing_extra(role):  # models are imported while the role runs
            run_role(role_module(role).serve(settings))


def settings_class(role: str) -> Any:
    """The class of its settings; importing it costs more than a start of the command line may."""
    from specdec import config

    return getattr(config, _SETTINGS[role])


def read_settings(role: str, options: dict[str, Any]) -> Any:
    """The role's settings; options that are None are left to the environment and the defaults.

    Raises:
        UsageError: a value that the settings do not take.
    """
    from pydantic import ValidationError

    try:
        return settings_class(role)(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        raise UsageError(_describe(error)) from None


def require_loopback(option: str, listen: str, *, insecure_bind: bool) -> None:
    """Raises UsageError for an address that other machines reach, unless that was asked for."""
    from specdec.config import is_loopback

    if not (insecure_bind or is_loopback(listen)):
        raise UsageError(f"{option}: {listen} can be reached from other machines without TLS; add --insecure-bind")


def role_module(role: str, name: str = "main") -> Any:
    """A module of the role's package. Raises UsageError where the role's extra is not installed."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    with _names_missing_extra(role):
        return importlib.import_module(f"{_PACKAGES[role]}.{name}")


@contextlib.contextmanager
def _names_missing_extra(role: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'specdec[{role}]'") from None


def _describe(error: "ValidationError") -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(_describe_one(fault["loc"], fault["msg"].removeprefix("Value error, ")) for fault in faults)


def _describe_one(location: "tuple[int | str, ...]", message: str) -> str:
    """Without a place it is of several options together; the place within a list of values tells nobody anything."""
    names = [part.replace("_", "-") for part in location if isinstance(part, str)]
    return f"--{'.'.join(names)}: {message}" if names else message
