"""Settings of the roles: every option of the command line, also from the environment.

An option given on the command line wins over the environment, which wins over the default. Knows names, ranges and
defaults, and refuses to know what they do. Secrets are SecretStr, so that no log and no repr shows them.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from specdec.params import MAX_DRAFT_NODES

EMBEDDED_REDIS = "embedded"
_REDIS_SCHEMES = tuple(
    f"{scheme}{topology}://" for topology in ("", "+sentinel", "+cluster") for scheme in ("redis", "rediss")
)


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
    keepalive_time_s: float = Field(default=0.5, gt=0)
    """A connection that is silent for this long is pinged."""
    keepalive_timeout_s: float = Field(default=1.4, gt=0)
    """A ping without an answer for this long breaks the connection: with keepalive_time_s, a peer that vanished or
    stands still is noticed within 2 s. Pings are answered by threads of gRPC's own, whatever Python does meanwhile."""
    min_ping_interval_s: float = Field(default=0.25, gt=0)
    """A server takes pings that come no faster; must be below the other side's keepalive_time_s."""
    max_concurrent_streams: int = Field(default=1024, ge=1)
    """Calls that one connection may have open; more wait at the caller."""
    max_metadata_bytes: int = Field(default=16 << 10, ge=1 << 10, le=1 << 20)
    """Largest metadata of one call that is received, a bearer token included."""
    pad_messages_to_bytes: int = Field(default=0, ge=0, le=1 << 16)
    """Messages on streams are filled up to a multiple of it, so that their size does not tell how many tokens were
    accepted. 0: they are as long as they are."""
    max_connections: int = Field(default=1024, ge=1)
    """Connections that a server has at one time; more are closed before they can ask for anything."""
    handshake_timeout_s: float = Field(default=10.0, gt=0, le=120)
    """A connection that has not finished its TLS or HTTP/2 handshake by then is closed."""
    max_reconnect_backoff_s: float = Field(default=2.0, gt=0)
    """Longest pause between attempts to reach a peer; grpc's own default of 120 s outlasts any failover."""


class CertificatePaths(NamedTuple):
    """PEM files of one identity. Without authorities nobody's certificate is asked for."""

    certificate: Path
    private_key: Path
    authorities: Path | None = None


class RoleSettings(BaseSettings):
    """What every server role has."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__", env_ignore_empty=True)

    listen: Endpoint = "127.0.0.1:0"
    """Where gRPC is served. Port 0 takes a free one and logs it."""
    metrics: Endpoint = "127.0.0.1:0"
    """Where /metrics is served over HTTP."""
    insecure_bind: bool = False
    """Allows other than loopback addresses where nothing is encrypted: gRPC without certificates, and /metrics always.
    The network has to be trusted then."""
    tls_cert: Path | None = None
    """PEM file with this role's certificate and its intermediates, whose DNS name is <role>.specdec. With it the roles
    speak TLS among themselves, and each proves which it is. Read again when it changes."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    tls_ca: Path | None = None
    """PEM file with the authorities whose certificates other roles must have."""
    reflection: bool = True
    """Whether the server tells tools what its services look like."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drain_grace_s: float = Field(default=10.0, ge=0, le=600)
    """After SIGTERM open streams have this long to end by themselves."""
    wire: WireSettings = WireSettings()

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        given = [name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(self, name) is not None]
        if len(given) in (1, 2):
            raise ValueError(f"tls_cert, tls_key and tls_ca go together; given: {', '.join(given)}")
        return self

    @property
    def tls(self) -> "CertificatePaths | None":
        """Where this role's own certificate lies; None: the roles speak in plaintext."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return CertificatePaths(self.tls_cert, self.tls_key, self.tls_ca)


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
    kept_tokens_grace_s: float = Field(default=30.0, ge=0, le=3600)
    """A session whose owner's stream broke keeps its tokens, and no cache, for this long: the next owner goes on from
    them. 0: none are kept."""
    max_verify_streams_per_peer: int = Field(default=64, ge=1, le=65536)
    """Drafters' streams from one address; more are answered TOO_MANY_STREAMS. One for each drafter will do."""
    max_attachments_per_stream: int = Field(default=1024, ge=1, le=65536)
    """Sessions that one drafter may be attached to at one time."""


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
    """embedded: a server of its own on a free port. Else a URL: redis://, redis+sentinel:// or redis+cluster://, and
    with rediss for redis each of them speaks TLS."""
    durability: Literal["relaxed", "strict"] = "relaxed"
    """strict: positions are in Redis before their tokens go to the client. relaxed: right after."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """A session's record lives this long after its last change."""
    abandoned_ttl_s: float = Field(default=600.0, gt=0)
    """A session whose owner is gone may be resumed for this long, and no longer than session_ttl_s."""
    token_key_file: Path | None = None
    """File with keys, 64 hexadecimal digits a line, that seal prompts and outputs in the record. The first one seals,
    all of them open. None: the record is as safe as Redis is."""
    store_tokens: bool = True
    """Prompts and outputs are in the record. False: positions and digests alone, and Resume needs the prompt again."""
    lease_s: float = Field(default=10.0, ge=1, le=600)
    """A session whose owner does not renew for this long is abandoned. A client's Resume need not wait for that."""
    max_sessions: int = Field(default=256, ge=1, le=65536)
    """Sessions served at one time; more are answered OVERLOADED."""
    resume_reserve: int = Field(default=64, ge=0, le=65536)
    """Sessions beyond max_sessions that only Resume may begin: those of a lost replica come before new ones."""
    slow_reader_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """A client that takes nothing of its stream for so long loses it, answered SLOW_READER; the session can be
    resumed."""
    tenant_requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests that each tenant may begin here, per second; more are answered RATE_LIMITED, with the time to come
    again. None: any number. Each orchestrator counts for itself."""
    tenant_request_burst: int | None = Field(default=None, ge=1)
    """Requests that may come at once after a pause. None: those of one second, one at least."""
    tenant_tokens_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tokens of prompts and outputs that each tenant may be served, per second. They are charged when they are served;
    a tenant in debt begins nothing new. None: any number."""
    tenant_token_burst: int | None = Field(default=None, ge=1)
    """Tokens that may be served at once after a pause. None: those of one second."""
    tenant_max_streams: int | None = Field(default=None, ge=1)
    """Sessions that each tenant may have here at one time; more are answered TOO_MANY_STREAMS. None: any number."""
    tenant_limits: Path | None = None
    """TOML or JSON file with tenants whose limits differ: [tenants.NAME], with these names less `tenant_`, and numbers
    or "unlimited". Read again when it changes."""
    failover_timeout_s: float = Field(default=30.0, ge=0, le=600)
    """A session that lost its verifier looks for another for so long; then its stream ends, and it can be resumed."""
    health_interval_s: float = Field(default=1.0, gt=0, le=60)
    """Pause between two looks at each verifier and drafter."""

    edge_tls_cert: Path | None = None
    """PEM file with the certificate that clients see, which names the host that they connect to. None: tls_cert."""
    edge_tls_key: Path | None = None
    """PEM file with its private key."""
    auth_tokens: Path | None = None
    """JSON file with the bearer tokens that clients may have, each with its tenant and scopes. Read again when it
    changes. With it, or with auth_jwks, no call but Health is answered without a token."""
    auth_jwks: Path | None = None
    """JSON Web Key Set with the public keys of those who issue JWTs for clients. Read again when it changes."""
    auth_jwt_issuer: str = ""
    """What `iss` of a JWT must be. Needed with auth_jwks."""
    auth_jwt_audience: str = ""
    """What `aud` of a JWT must hold. Needed with auth_jwks."""
    auth_jwt_tenant_claim: str = Field(default="tenant", min_length=1)
    """The claim of a JWT that names the tenant."""
    auth_jwt_leeway_s: float = Field(default=30.0, ge=0, le=300)
    """How far the issuer's clock may be from ours."""
    max_streams_per_peer: int = Field(default=1024, ge=1)
    """Calls that the clients of one address may have open; more are answered TOO_MANY_STREAMS."""

    @field_validator("verifiers", "drafters", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return _split_at_commas(value)

    @field_validator("redis")
    @classmethod
    def _known_scheme(cls, value: SecretStr) -> SecretStr:
        url = value.get_secret_value()
        if url != EMBEDDED_REDIS and not url.startswith(_REDIS_SCHEMES):
            raise ValueError(f"must be 'embedded' or begin with one of {', '.join(_REDIS_SCHEMES)}")
        return value

    @model_validator(mode="after")
    def _whole_edge(self) -> Self:
        if (self.edge_tls_cert is None) != (self.edge_tls_key is None):
            raise ValueError("edge_tls_cert and edge_tls_key go together")
        if self.auth_jwks is not None and not (self.auth_jwt_issuer and self.auth_jwt_audience):
            raise ValueError("auth_jwks needs auth_jwt_issuer and auth_jwt_audience")
        return self

    @property
    def edge_tls(self) -> CertificatePaths | None:
        """The certificate that clients see, who need none; None: clients speak in plaintext."""
        if self.edge_tls_cert is not None and self.edge_tls_key is not None:
            return CertificatePaths(self.edge_tls_cert, self.edge_tls_key)
        return None if self.tls is None else self.tls._replace(authorities=None)
