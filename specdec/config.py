"""Settings of the roles: every option of the command line, also from the environment.

An option given on the command line wins over the environment, which wins over the default. Knows names, ranges and
defaults, and refuses to know what they do. Secrets are SecretStr, so that no log and no repr shows them.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from specdec.params import MAX_DRAFT_NODES

EMBEDDED_REDIS = "embedded"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6 address]:port"; raises ValueError for anything else."""
    host, colon, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536) or "/" in endpoint:
        raise ValueError(f"not host:port: {endpoint!r}")
    return host, int(port)


def format_endpoint(host: str, port: int) -> str:
    """The inverse of parse_endpoint."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach an endpoint that is bound so."""
    host, _ = parse_endpoint(endpoint)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked_endpoint(endpoint: str) -> str:
    parse_endpoint(endpoint)
    return endpoint


def _split_at_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Endpoint = Annotated[str, AfterValidator(_checked_endpoint)]
"""host:port; port 0 asks for a free one where something listens."""


class WireSettings(BaseModel):
    """Limits and liveness of gRPC connections. The same numbers on both sides of a connection work together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_message_bytes: int = Field(default=16 << 20, ge=1 << 10, le=1 << 30)
    """Largest message that is received: 16 nodes with float32 probabilities over 152,000 tokens each have 10 MB."""
    keepalive_time_s: float = Field(default=10.0, gt=0)
    """A connection that is silent for this long is pinged."""
    keepalive_timeout_s: float = Field(default=5.0, gt=0)
    """A ping without an answer for this long breaks the connection: a peer that vanished is noticed after 15 s."""
    min_ping_interval_s: float = Field(default=5.0, gt=0)
    """A server takes pings that come no faster; must be below the other side's keepalive_time_s."""
    max_concurrent_streams: int = Field(default=1024, ge=1)
    """Calls that one connection may have open; more wait at the caller."""
    max_reconnect_backoff_s: float = Field(default=2.0, gt=0)
    """Longest pause between attempts to reach a peer; grpc's own default of 120 s outlasts any failover."""


class RoleSettings(BaseSettings):
    """What every server role has."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__", env_ignore_empty=True)

    listen: Endpoint = "127.0.0.1:0"
    """Where gRPC is served. Port 0 takes a free one and logs it."""
    metrics: Endpoint = "127.0.0.1:0"
    """Where /metrics is served over HTTP."""
    insecure_bind: bool = False
    """Allows other than loopback addresses: there is no TLS here, so the network has to be trusted."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_grace_s: float = Field(default=10.0, ge=0, le=600)
    """After SIGTERM open streams have this long to end by themselves."""
    wire: WireSettings = WireSettings()


class _ModelSettings(RoleSettings):
    """What a role with a model has besides."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where present."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the fastest format whose kernels are exact on the device at hand."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of one forward pass. None: what torch takes, all physical cores."""
    cache_dir: Path | None = None
    """Where downloaded and dequantised models are kept. None: $SPECDEC_CACHE, else ~/.cache/specdec."""


class VerifierSettings(_ModelSettings):
    """`specdec verifier`; environment SPECDEC_VERIFIER_..."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_VERIFIER_")

    model: str = Field(min_length=1)
    """Named model, hub id, local folder, .gguf file or synthetic:..."""
    max_sessions: int = Field(default=256, ge=1, le=65536)
    """Sessions that run at one time, if the cache has room for so many; more wait."""
    max_waiting_sessions: int = Field(default=1024, ge=0, le=65536)
    """Sessions that may wait. Beyond it the last to come of the tenant that has most waiting is answered OVERLOADED,
    with a time to come again."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """Memory for keys and values of all sessions. None: a share of what is free, by the device."""
    prefix_caching: bool = True
    """Prompts of one tenant that begin alike are computed once while their keys and values are in the cache."""
    max_draft_tokens: int = Field(default=32, ge=0, le=MAX_DRAFT_NODES)
    """Largest draft budget of one session. A lookup that copies a passage gains by long drafts; a draft model chooses
    less by itself."""
    draft_wait_ms: float = Field(default=2000.0, ge=0, le=60_000)
    """A verify step waits no longer for an attached drafter, less where that does not pay, and not at all for one that
    let it wait in vain before. On a CPU a draft of 8 tokens of a 0.5B model takes half a second."""
    max_step_rows: int | None = Field(default=None, ge=2, le=65536)
    """Rows of one forward pass over all sessions: long prompts are cut into such chunks, and whoever comes meanwhile
    waits for one of them. None: 64 on a CPU, on a GPU the most that the self-check found exact."""
    default_max_new_tokens: int = Field(default=1024, ge=1)
    """Output limit of requests that give none."""


class DrafterSettings(_ModelSettings):
    """`specdec drafter`; environment SPECDEC_DRAFTER_..."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFTER_")

    proposer: Literal["draft_model", "ngram", "stacked"] = "draft_model"
    """A small model, a lookup in the text so far, or (stacked) the lookup where it finds something, else the model."""
    model: str = ""
    """The draft model. ngram needs none."""
    quantization: Literal["none", "int8", "int4"] = "int8"
    """Weights of the draft model: drafts need speed, not bits, and int8 was the fastest at one row."""
    max_draft_tokens: int = Field(default=32, ge=1, le=MAX_DRAFT_NODES)
    """The drafter's own limit; the verifier's budget and the expected acceptance shorten it."""
    max_sessions: int = Field(default=64, ge=1, le=65536)
    """Attached sessions; more are answered OVERLOADED."""
    niceness: int = Field(default=0, ge=0, le=19)
    """Added to the process's nice value: on shared cores a drafter that reads a prompt should not delay the target."""


class OrchestratorSettings(RoleSettings):
    """`specdec orchestrator`; environment SPECDEC_ORCHESTRATOR_..."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_ORCHESTRATOR_")

    verifiers: Annotated[tuple[Endpoint, ...], NoDecode] = ()
    """Verifiers, as host:port,host:port."""
    drafters: Annotated[tuple[Endpoint, ...], NoDecode] = ()
    """Drafters, as host:port,host:port."""
    redis: SecretStr = SecretStr(EMBEDDED_REDIS)
    """embedded: a server of its own on a free port. Else a redis:// or rediss:// URL."""
    durability: Literal["relaxed", "strict"] = "relaxed"
    """strict: positions are in Redis before their tokens go to the client. relaxed: right after."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """A session's record lives this long after its last change."""
    store_tokens: bool = True
    """Prompts and outputs are in the record. False: positions and digests alone, and Resume needs the prompt again."""
    lease_s: float = Field(default=10.0, ge=1, le=600)
    """An owner that does not renew for this long may be taken over."""
    max_sessions: int = Field(default=256, ge=1, le=65536)
    """Streams served at one time; more are answered OVERLOADED."""
    health_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Pause between two looks at each verifier and drafter."""

    @field_validator("verifiers", "drafters", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return _split_at_commas(value)

    @field_validator("redis")
    @classmethod
    def _known_scheme(cls, value: SecretStr) -> SecretStr:
        url = value.get_secret_value()
        if url != EMBEDDED_REDIS and not url.startswith(("redis://", "rediss://")):
            raise ValueError("must be 'embedded', redis://... or rediss://...")
        return value
