"""What a local cluster runs, and the command line of each of its roles. Pure: starts nothing."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specdec.cli.certs import role_options

LOOPBACK = "127.0.0.1:0"
DRAFTER_NICENESS = 5
"""Drafters share their cores with the verifier here. A quarter of the time is theirs while the target reads a prompt;
in the rounds that follow the verifier waits for them, and they have all of it."""
PROPOSERS = ("ngram", "draft_model", "stacked", "none")
_PROPOSERS_WITH_MODEL = ("draft_model", "stacked")


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """`proposer` none starts no drafter; with a `verifier_endpoint` that one is used and none is started;
    `certificates` is a folder of `specdec certs`; `extra_arguments` go to every process of a role as they are."""

    model: str = "smollm2-135m"
    proposer: str = "ngram"
    draft_model: str | None = None
    quantization: str | None = None
    num_drafters: int = 1
    verifier_endpoint: str | None = None
    listen: str = LOOPBACK
    insecure_bind: bool = False
    certificates: Path | None = None
    redis: str = "embedded"
    device: str | None = None
    dtype: str | None = None
    num_threads: int | None = None
    num_draft_threads: int | None = None
    log_folder: Path | None = None
    start_timeout_s: float = 1800.0
    stop_grace_s: float = 15.0
    extra_arguments: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def validated(self) -> "ClusterOptions":
        """Returns self; raises ValueError that tells what does not go together."""
        if self.proposer not in PROPOSERS:
            raise ValueError(f"proposer must be one of {', '.join(PROPOSERS)}")
        with_model = self.proposer in _PROPOSERS_WITH_MODEL
        if with_model and self.draft_model is None:
            raise ValueError(f"proposer {self.proposer} needs a draft model")
        if not with_model and (self.draft_model is not None or self.quantization is not None):
            raise ValueError(f"proposer {self.proposer} has no draft model")
        if self.certificates is not None:
            for role in ("verifier", "drafter", "orchestrator"):
                role_options(self.certificates, role)
        if self.num_drafters < 1:
            raise ValueError("at least one drafter; proposer none starts none")
        return self


CommandBuilder = Callable[[str, Sequence[str]], Sequence[str]]
"""(role, its options) -> the whole command line. Tests put stand-ins here."""


def role_command_line(role: str, arguments: Sequence[str]) -> Sequence[str]:
    """The same interpreter that runs us, whatever PATH says."""
    return [sys.executable, "-m", "specdec.cli.main", role, *arguments]


def verifier_arguments(options: ClusterOptions) -> list[str]:
    return [
        *("--model", options.model, "--listen", LOOPBACK),
        *_tls(options, "verifier"),
        *_options(device=options.device, dtype=options.dtype, threads=options.num_threads),
    ]


def drafter_arguments(options: ClusterOptions) -> list[str]:
    return [
        *("--proposer", options.proposer, "--listen", LOOPBACK),
        *("--niceness", str(DRAFTER_NICENESS)),
        *_options(model=options.draft_model, quantization=options.quantization, device=options.device),
        *_options(threads=options.num_draft_threads),
        *_tls(options, "drafter"),
    ]


def orchestrator_arguments(options: ClusterOptions, endpoints: Mapping[str, str]) -> list[str]:
    """`endpoints`: host:port by process name, of the roles that are there already."""
    drafters = [endpoints[name] for name in sorted(endpoints) if name.startswith("drafter")]
    return [
        *("--listen", options.listen),
        *(["--insecure-bind"] if options.insecure_bind else []),
        *_tls(options, "orchestrator"),
        *_options(verifiers=endpoints["verifier"], drafters=",".join(drafters) or None),
    ]


def orchestrator_environment(options: ClusterOptions) -> dict[str, str]:
    """A Redis URL may hold a password, and anyone on the machine can read a command line."""
    return {"SPECDEC_ORCHESTRATOR_REDIS": options.redis}


def _tls(options: ClusterOptions, role: str) -> list[str]:
    return [] if options.certificates is None else role_options(options.certificates, role)


def _options(**values: object) -> list[str]:
    """Command line options for those that are set."""
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
