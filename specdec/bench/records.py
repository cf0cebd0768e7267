"""What a benchmark writes down as it goes. Facts only: figures are made of them in `report`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.bench.plan import BenchPrompt, Lane
from specdec.messages import RoundStatistics, SpeculativeStatistics


@dataclasses.dataclass(frozen=True)
class Generation:
    """One output of ours. Times are seconds from the request's departure, as the client saw them."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_first_tokens: int
    first_tokens_s: float
    last_tokens_s: float
    elapsed_s: float
    rounds: tuple[RoundStatistics, ...]
    statistics: SpeculativeStatistics
    numerics_fingerprint: str = ""


@dataclasses.dataclass(frozen=True)
class PeerGeneration:
    """One output of another program, from the tokenised prompt to the last token."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    elapsed_s: float


@dataclasses.dataclass(frozen=True)
class TopTwo:
    """The two likeliest tokens at one position by the other program's logits, likeliest first."""

    token_ids: tuple[int, int]
    logits: tuple[float, float]


@dataclasses.dataclass
class PromptRecord:
    """Everything measured on one prompt. `speculative` is by lane label, `peers` by mode; `top_two` is for the first
    place where our greedy output leaves the other program's."""

    prompt: BenchPrompt
    target_only: Generation | None = None
    speculative: dict[str, Generation] = dataclasses.field(default_factory=dict)
    peers: dict[str, PeerGeneration] = dataclasses.field(default_factory=dict)
    top_two: TopTwo | None = None


@dataclasses.dataclass
class IdleShares:
    """CPU time over wall time of those who should rest, one value for each generation of the others."""

    servers_during_peers: list[float] = dataclasses.field(default_factory=list)
    peers_during_servers: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Recording:
    """Grows while a benchmark runs; whatever it holds can be reported at any time."""

    commit: str
    machine: Mapping[str, Any]
    settings: dict[str, Any]
    lanes: Sequence[Lane]
    peer_modes: Sequence[str] = ()
    prompts: list[PromptRecord] = dataclasses.field(default_factory=list)
    idle: IdleShares = dataclasses.field(default_factory=IdleShares)
    complete: bool = False
    ended_by: str = ""
