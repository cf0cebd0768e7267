"""What hypothesis draws schedules from. Small numbers and early times shrink best, so that is what they shrink to."""

import functools

from hypothesis import strategies as st

from specdec.params import AcceptanceRule
from tests.simulation.faults import Fault, Kind, Request, Schedule

MAX_FAULTS = 8
SECONDS = st.sampled_from((0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 6.0))
OUTAGES = st.sampled_from((0.05, 0.3, 1.5, 4.0, 8.0, 20.0))
JUMPS = st.sampled_from((-3600.0, -20.0, -1.0, 1.0, 20.0, 300.0))
STORE = "store"

requests = st.builds(
    Request,
    rule=st.sampled_from((AcceptanceRule.GREEDY, AcceptanceRule.COUPLED, AcceptanceRule.ONE_HOT)),
    seed=st.integers(0, 9),
    max_new_tokens=st.sampled_from((8, 3, 16, 24)),
    begins_s=st.sampled_from((0.0, 0.1, 0.5)),
    stop_strings=st.sampled_from(((), (), ("bc", "zz"), ("ab", "ca", "hh"))),
)


@st.composite
def schedules(draw: st.DrawFn, kinds: frozenset[Kind] = frozenset(Kind), max_faults: int = MAX_FAULTS) -> Schedule:
    shape = Schedule(
        requests=tuple(draw(st.lists(requests, min_size=1, max_size=3))),
        num_verifiers=draw(st.integers(1, 3)),
        num_drafters=draw(st.integers(0, 2)),
        num_orchestrators=draw(st.integers(1, 2)),
        strict=draw(st.booleans()),
    )
    any_fault = faults(kinds, shape.num_verifiers, shape.num_drafters, shape.num_orchestrators, len(shape.requests))
    return Schedule(
        **{**vars(shape), "faults": tuple(draw(st.lists(any_fault, max_size=max_faults)))},
    )


@functools.cache
def faults(
    kinds: frozenset[Kind], num_verifiers: int, num_drafters: int, num_orchestrators: int, num_clients: int
) -> st.SearchStrategy[Fault]:
    """Any fault of these kinds in that cluster."""
    verifiers = [f"verifier{index}" for index in range(num_verifiers)]
    drafters = [f"drafter{index}" for index in range(num_drafters)]
    orchestrators = [f"orchestrator{index}" for index in range(num_orchestrators)]
    clients = [f"client{index}" for index in range(num_clients)]
    roles = [*verifiers, *drafters, *orchestrators]
    links = [
        *((one, other) for one in orchestrators for other in [*verifiers, *drafters, *clients, STORE]),
        *((one, other) for one in drafters for other in verifiers),
    ]
    links += [(other, one) for one, other in links]

    def of(kind: Kind, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[Fault]:
        return st.builds(Fault, after_s=SECONDS, kind=st.just(kind), **fields)  # type: ignore[arg-type]

    def between(kind: Kind, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[Fault]:
        return st.tuples(st.sampled_from(links), of(kind, **fields)).map(
            lambda pair: Fault(pair[1].after_s, kind, *pair[0], for_s=pair[1].for_s)
        )

    any_role, any_client = st.sampled_from(roles), st.sampled_from(clients)
    ways = (
        (Kind.KILL, of(Kind.KILL, who=any_role, for_s=OUTAGES)),
        (Kind.KILL, of(Kind.KILL, who=st.sampled_from(verifiers), for_s=OUTAGES)),
        (Kind.PAUSE, of(Kind.PAUSE, who=any_role, for_s=OUTAGES)),
        (Kind.TERMINATE, of(Kind.TERMINATE, who=any_role, for_s=OUTAGES)),
        (Kind.CUT, between(Kind.CUT, for_s=OUTAGES)),
        (Kind.CUT_ONE_WAY, between(Kind.CUT_ONE_WAY, for_s=OUTAGES)),
        (Kind.SLOW, between(Kind.SLOW, for_s=st.sampled_from((0.03, 0.3, 2.0)))),
        (Kind.RESET, between(Kind.RESET)),
        (Kind.DUPLICATE, of(Kind.DUPLICATE)),
        (Kind.STORE_AWAY, of(Kind.STORE_AWAY, for_s=OUTAGES)),
        (Kind.STORE_SAVES, of(Kind.STORE_SAVES)),
        (Kind.STORE_ROLLS_BACK, of(Kind.STORE_ROLLS_BACK)),
        (Kind.STORE_EMPTY, of(Kind.STORE_EMPTY)),
        (Kind.STORE_REPLIES_LOST, of(Kind.STORE_REPLIES_LOST)),
        (Kind.CLOCK_JUMP, of(Kind.CLOCK_JUMP, who=st.sampled_from([*roles, STORE]), for_s=JUMPS)),
        (Kind.CLIENT_RECONNECTS, of(Kind.CLIENT_RECONNECTS, who=any_client)),
        (Kind.CLIENT_FORGETS, of(Kind.CLIENT_FORGETS, who=any_client)),
        (Kind.CLIENT_LEAVES, of(Kind.CLIENT_LEAVES, who=any_client)),
        (Kind.CLIENT_CANCELS, of(Kind.CLIENT_CANCELS, who=any_client)),
    )
    return st.one_of(*(way for kind, way in ways if kind in kinds))
