"""What one orchestrator learns for choosing, and brings to the router."""

import dataclasses
from collections import Counter

from orchestrator.endpoints import EndpointView
from orchestrator.routing import Routing
from specdec.ids import SessionId
from specdec.messages import Load, ModelInfo, ServerStatus
from specdec.messages.cluster import Role
from specdec.params import GenerationSpec

SYSTEM = GenerationSpec("You answer in verse. " * 200)


def verifiers(loads: dict[str, int], incarnation: int = 1) -> list[EndpointView]:
    return [
        EndpointView(
            endpoint,
            Role.VERIFIER,
            healthy=True,
            incarnation=incarnation,
            status=ServerStatus(True, False, "0", 1, model=ModelInfo("m", 1, 1, "f"), load=Load(load)),
        )
        for endpoint, load in loads.items()
    ]


def test_a_burst_is_spread_before_any_verifier_has_told_of_it() -> None:
    routing, views = Routing(lambda: 0.0), verifiers({"a:1": 0, "b:1": 6, "c:1": 0})
    chosen = Counter(
        routing.choose_verifier(views, SessionId(f"s{number}"), GenerationSpec("hi"), "").endpoint
        for number in range(24)
    )
    assert {"a:1": chosen["a:1"], "b:1": chosen["b:1"] + 6, "c:1": chosen["c:1"]} == {"a:1": 10, "b:1": 10, "c:1": 10}


def test_orchestrators_that_see_the_same_gap_at_the_same_time_fill_it_together_and_not_each_for_itself() -> None:
    views = verifiers({"a:1": 0, "b:1": 40, "c:1": 40})
    own = {"b:1": 10, "c:1": 10}  # a quarter of all: there are three more like this one
    fleet = [Routing(lambda: 0.0) for _ in range(4)]
    placed: Counter[str] = Counter()
    for index, routing in enumerate(fleet):
        for number in range(20):
            name = SessionId(f"s{index}.{number}")
            placed[routing.choose_verifier(views, name, GenerationSpec("hi"), "", num_own_sessions=own).endpoint] += 1
    assert 35 <= placed["a:1"] <= 65, "alone, each would have sent all of its twenty there"


def test_what_was_sent_since_counts_until_the_verifier_tells_of_it() -> None:
    routing, views = Routing(lambda: 0.0), verifiers({"a:1": 0, "b:1": 3})
    for number in range(4):
        routing.choose_verifier(views, SessionId(f"s{number}"), GenerationSpec("hi"), "")
    looked_again = verifiers({"a:1": 0, "b:1": 1})  # all of them ended meanwhile
    assert routing.choose_verifier(looked_again, SessionId("s"), GenerationSpec("hi"), "").endpoint == "a:1"


def test_a_prompt_follows_the_one_that_began_alike_until_its_verifier_starts_anew() -> None:
    routing, views = Routing(lambda: 0.0), verifiers({"a:1": 2, "b:1": 0, "c:1": 2})
    first = routing.choose_verifier(views, SessionId("s1"), SYSTEM, "", excluded={"b:1"}).endpoint
    again = dataclasses.replace(SYSTEM, prompt=f"{SYSTEM.prompt}And a question.")
    assert routing.choose_verifier(views, SessionId("s2"), again, "").endpoint == first
    restarted = verifiers({"a:1": 9, "b:1": 0, "c:1": 9}, incarnation=2)
    assert routing.choose_verifier(restarted, SessionId("s3"), again, "").endpoint == "b:1"


def test_attaches_are_timed_for_each_verifier() -> None:
    routing = Routing(lambda: 0.0)
    for _ in range(20):
        routing.note_attach("quick:1", 0.01)
        routing.note_attach("slow:1", 2.0)
    assert routing.hedge_delay_s("quick:1") < routing.hedge_delay_s("new:1") < routing.hedge_delay_s("slow:1")
