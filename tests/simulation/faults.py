"""Schedules: which cluster, which requests, and what goes wrong when. Plain data, as a failing test prints them."""

import dataclasses
from enum import Enum

from specdec.params import AcceptanceRule, GenerationSpec, SamplingParams, StopCriteria


class Kind(Enum):
    """What goes wrong. `who` and `other` name processes, `for_s` says how long until it is mended."""

    KILL = "KILL"  # state gone; started anew after for_s
    PAUSE = "PAUSE"  # SIGSTOP, SIGCONT after for_s
    TERMINATE = "TERMINATE"  # SIGTERM: drains, then is started anew after for_s
    CUT = "CUT"  # both directions between who and other; what is sent meanwhile waits
    CUT_ONE_WAY = "CUT_ONE_WAY"  # from who to other alone
    SLOW = "SLOW"  # what who sends to other is for_s late from now on; overtaken by what goes elsewhere
    RESET = "RESET"  # connections between who and other break, with what was on its way
    DUPLICATE = "DUPLICATE"  # the next unary requests of drafters and clients come twice
    STORE_AWAY = "STORE_AWAY"  # refuses connections
    STORE_SAVES = "STORE_SAVES"  # what is written from here on is lost by a roll back
    STORE_ROLLS_BACK = "STORE_ROLLS_BACK"
    STORE_EMPTY = "STORE_EMPTY"
    STORE_REPLIES_LOST = "STORE_REPLIES_LOST"  # the next scripts run, and nobody hears of it
    CLOCK_JUMP = "CLOCK_JUMP"  # who's wall clock, by for_s, which may be negative; the store's too
    CLIENT_RECONNECTS = "CLIENT_RECONNECTS"  # who closes its stream and resumes elsewhere
    CLIENT_FORGETS = "CLIENT_FORGETS"  # the same without closing: to the server its stream looks alive
    CLIENT_LEAVES = "CLIENT_LEAVES"  # for good
    CLIENT_CANCELS = "CLIENT_CANCELS"


@dataclasses.dataclass(frozen=True)
class Fault:
    after_s: float
    kind: Kind
    who: str = ""
    other: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"+{self.after_s:.2f} s", self.kind.value, self.who, self.other]
        return " ".join(part for part in parts if part) + (f" for {self.for_s:.2f} s" if self.for_s else "")


@dataclasses.dataclass(frozen=True)
class Request:
    """One client's request. `seed` decides the prompt too."""

    rule: AcceptanceRule = AcceptanceRule.GREEDY
    seed: int = 0
    max_new_tokens: int = 8
    stop_strings: tuple[str, ...] = ()
    begins_s: float = 0.0
    drafts: bool = True

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(1 + (7 * self.seed + 3 * place + place * place) % 20 for place in range(3 + self.seed % 18))

    def spec(self) -> GenerationSpec:
        greedy = self.rule is AcceptanceRule.GREEDY
        return GenerationSpec(
            self.prompt,
            sampling=SamplingParams(
                temperature=0.0 if greedy else 1.0, seed=self.seed, acceptance_rule=None if greedy else self.rule
            ),
            stop=StopCriteria(max_new_tokens=self.max_new_tokens, stop_strings=self.stop_strings),
        )


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One run. `numerics` has one fingerprint for each verifier."""

    requests: tuple[Request, ...] = (Request(),)
    faults: tuple[Fault, ...] = ()
    num_verifiers: int = 2
    num_drafters: int = 1
    num_orchestrators: int = 2
    strict: bool = False

    @property
    def disturbs_store(self) -> bool:
        """Whether the store may forget or miss something."""
        return any(fault.kind in STORE_LOSSES for fault in self.faults) or any(
            "store" in (fault.who, fault.other) for fault in self.faults
        )

    def __str__(self) -> str:
        counts = f"{self.num_verifiers} verifiers, {self.num_drafters} drafters, {self.num_orchestrators} orchestrators"
        lines = [f"{counts}, {'strict' if self.strict else 'relaxed'}"]
        lines += [f"client{index}: {request}" for index, request in enumerate(self.requests)]
        lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)


STORE_LOSSES = frozenset({Kind.STORE_AWAY, Kind.STORE_ROLLS_BACK, Kind.STORE_EMPTY, Kind.STORE_REPLIES_LOST})
