"""Which fault comes when: drawn from a seed, so that a campaign can be run again. Pure."""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from specdec.bench.faults.kinds import Act, FaultKind, Party

_HOLD_S: Mapping[Act, tuple[float, float]] = {
    Act.KILL: (0.5, 2.0),
    Act.KILL_LOSING_TAIL: (0.5, 2.0),
    Act.KILL_LOSING_ALL: (0.5, 2.0),
    Act.STOP: (5.0, 5.0),
    Act.DRAIN: (0.0, 0.0),
    Act.HALF_OPEN: (8.0, 8.0),
    Act.RESET: (0.0, 0.0),
    Act.HOLD_TO_SERVER: (2.0, 6.0),
    Act.HOLD_TO_CLIENT: (2.0, 6.0),
    Act.HOLD_BOTH: (2.0, 6.0),
}
"""How long a fault lasts, in seconds from and to. A process that was killed stays away so long."""
_PAUSE_S = (1.0, 3.0)
"""Between one fault of a lane and the next, after all that was struck serves again."""


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """`choice` in [0, 1) picks whom it strikes among those that are there then."""

    number: int
    kind: FaultKind
    pause_s: float
    hold_s: float
    choice: float


def plan_faults(num_faults: int, kinds: Sequence[FaultKind], seed: int) -> dict[Party, list[PlannedFault]]:
    """By lane, in the order of injection. Kinds come by their weights; none comes again before it is its turn."""
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    drawn = _draw(num_faults, kinds, chance)
    lanes: dict[Party, list[PlannedFault]] = {}
    for number, kind in enumerate(drawn):
        fault = PlannedFault(
            number=number,
            kind=kind,
            pause_s=chance.uniform(*_PAUSE_S),
            hold_s=chance.uniform(*_HOLD_S[kind.act]),
            choice=chance.random(),
        )
        lanes.setdefault(kind.lane, []).append(fault)
    return lanes


def _draw(num_faults: int, kinds: Sequence[FaultKind], chance: random.Random) -> list[FaultKind]:
    """Each kind once before any comes again, then by weight: a short campaign sees as many kinds as a long one may."""
    once = list(kinds)
    chance.shuffle(once)
    deck: list[FaultKind] = []
    drawn = once[:num_faults]
    while len(drawn) < num_faults:
        if not deck:
            deck = [kind for kind in kinds for _ in range(kind.weight)]
            chance.shuffle(deck)
        drawn.append(deck.pop())
    return drawn
