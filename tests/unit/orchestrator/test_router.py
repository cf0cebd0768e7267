"""Choosing a verifier and a drafter."""

import dataclasses
from collections import Counter

import pytest

from orchestrator.endpoints import EndpointView
from orchestrator.router import SessionNeeds, choose_drafter, choose_verifier
from specdec.errors import InvalidParameterError, NoVerifierError, UnknownModelError
from specdec.messages import Load, ModelInfo, Numerics, ServerStatus
from specdec.messages.cluster import Role


def view(
    endpoint: str,
    model: str = "m",
    *,
    load: int = 0,
    role: Role = Role.VERIFIER,
    fingerprint: str = "f",
    numerics: str | None = None,
) -> EndpointView:
    own = Numerics(numerics, "", "", "", "", "", "", "") if numerics is not None else None
    info = ModelInfo(model, 100, 512, fingerprint, own) if model else None
    status = ServerStatus(True, False, "0", 1, model=info, load=Load(num_active_sessions=load))
    return EndpointView(endpoint, role, healthy=True, status=status)


def test_the_least_loaded_verifier_is_chosen_and_the_first_by_name_among_equals() -> None:
    assert choose_verifier([view("b:1", load=2), view("a:1", load=3)], "m").endpoint == "b:1"
    assert choose_verifier([view("b:1"), view("a:1")], "m").endpoint == "a:1"


def test_own_sessions_count_before_the_verifier_has_told_of_them() -> None:
    views = [view("a:1", load=1), view("b:1", load=2)]
    assert choose_verifier(views, "m", num_own_sessions={"a:1": 3}).endpoint == "b:1"


def test_unhealthy_drained_draining_and_excluded_verifiers_are_left_out() -> None:
    good = view("z:1", load=9)
    bad = [
        dataclasses.replace(view("a:1"), healthy=False),
        dataclasses.replace(view("b:1"), drained=True),
        dataclasses.replace(view("c:1"), status=ServerStatus(True, True, "0", 1, model=ModelInfo("m", 1, 1, "f"))),
        dataclasses.replace(view("e:1"), status=ServerStatus(True, False, "0", 2, model=ModelInfo("m", 1, 1, "f"))),
        view("d:1"),
    ]
    assert choose_verifier([*bad, good], "m", excluded={"d:1"}) == good
    with pytest.raises(NoVerifierError):
        choose_verifier(bad, "m", excluded={"d:1"})


def test_a_model_that_nobody_holds_is_unknown_but_one_that_is_away_is_not() -> None:
    away = dataclasses.replace(view("a:1", "gone"), healthy=False)
    with pytest.raises(UnknownModelError):
        choose_verifier([view("b:1", "m"), away], "other")
    with pytest.raises(NoVerifierError):
        choose_verifier([view("b:1", "m"), away], "gone")
    silent = EndpointView("c:1", Role.VERIFIER)
    with pytest.raises(NoVerifierError):
        choose_verifier([view("b:1", "m"), silent], "other")


def test_without_a_name_the_only_model_is_meant_and_among_several_none() -> None:
    assert choose_verifier([view("a:1")], "").endpoint == "a:1"
    with pytest.raises(InvalidParameterError):
        choose_verifier([view("a:1", "one"), view("b:1", "two")], "")


def test_a_session_that_goes_on_bit_for_bit_goes_to_equal_numerics_alone() -> None:
    views = [
        view("a:1", numerics="n1"),
        view("b:1", load=9, numerics="n2"),
        view("c:1", load=7, numerics="n2"),
        view("d:1"),
    ]
    assert choose_verifier(views, "m", numerics_fingerprint="n2") == views[2]
    assert choose_verifier(views, "m", numerics_fingerprint="n2", excluded={"c:1"}) == views[1]
    with pytest.raises(NoVerifierError):
        choose_verifier(views, "m", numerics_fingerprint="n3")


def loaded(endpoint: str, **load: float) -> EndpointView:
    status = view(endpoint).status
    assert status is not None
    return dataclasses.replace(view(endpoint), status=dataclasses.replace(status, load=Load(**load)))


def test_of_equally_busy_verifiers_the_one_with_more_free_blocks_is_chosen() -> None:
    views = [
        loaded("a:1", num_active_sessions=4, kv_used_bytes=70, kv_budget_bytes=100),
        loaded("b:1", num_active_sessions=4, kv_used_bytes=20, kv_budget_bytes=100),
    ]
    assert choose_verifier(views, "m").endpoint == "b:1"


def test_a_verifier_without_room_for_one_more_comes_last_however_idle_it_is_and_whatever_it_has_cached() -> None:
    full = loaded("a:1", num_active_sessions=1, kv_used_bytes=60, kv_budget_bytes=100)
    busy = loaded("b:1", num_active_sessions=30, kv_used_bytes=60, kv_budget_bytes=1000)
    needs = SessionNeeds(num_prompt_tokens=1000, cached_tokens={"a:1": 1000})
    assert choose_verifier([full, busy], "m", needs=needs) == busy
    assert choose_verifier([full], "m", needs=needs) == full, "it waits there rather than be refused"
    queueing = loaded("a:1", queue_wait_s=3.0)
    assert choose_verifier([queueing, busy], "m", needs=needs) == busy


def test_those_that_wait_count_twice_for_their_prompts_are_still_to_come() -> None:
    views = [
        loaded("a:1", num_active_sessions=1, num_waiting_sessions=3),
        loaded("b:1", num_active_sessions=5, num_waiting_sessions=0),
    ]
    assert choose_verifier(views, "m").endpoint == "b:1"


def test_a_slower_verifier_gets_fewer_sessions() -> None:
    needs = SessionNeeds(forward_s={"a:1": 0.04, "b:1": 0.01})
    placed: Counter[str] = Counter()
    for _ in range(100):
        placed[choose_verifier([view("a:1"), view("b:1")], "m", num_own_sessions=placed, needs=needs).endpoint] += 1
    assert placed["b:1"] > 3 * placed["a:1"] > 0


def test_the_verifier_that_has_a_prompt_may_be_ahead_of_the_others_but_only_so_far() -> None:
    needs = SessionNeeds(num_prompt_tokens=4000, cached_tokens={"a:1": 4000})
    chosen = [choose_verifier([view("a:1", load=load), view("b:1")], "m", needs=needs).endpoint for load in range(40)]
    ahead = chosen.index("b:1")
    assert 3 <= ahead <= 10
    assert chosen == ["a:1"] * ahead + ["b:1"] * (40 - ahead)
    short = SessionNeeds(num_prompt_tokens=40, cached_tokens={"a:1": 40})
    assert choose_verifier([view("a:1", load=2), view("b:1")], "m", needs=short).endpoint == "b:1"


def test_orchestrators_that_never_saw_a_prompt_send_it_to_the_same_verifier_and_prompts_to_different_ones() -> None:
    views = [view(f"{name}:1") for name in "abcd"]

    def home(beginning: str, session: str) -> str:
        needs = SessionNeeds(num_prompt_tokens=4000, beginning=beginning, tie_breaker=session)
        return choose_verifier(views, "m", needs=needs).endpoint

    assert len({home("one", f"s{number}") for number in range(20)}) == 1
    assert len({home(f"beginning {number}", "s") for number in range(40)}) == 4


def test_equals_are_taken_in_turn_where_sessions_differ() -> None:
    views = [view(f"{name}:1") for name in "abcd"]
    chosen = Counter(
        choose_verifier(views, "m", needs=SessionNeeds(tie_breaker=f"s{number}")).endpoint for number in range(200)
    )
    assert min(chosen.values()) > 25


def test_no_verifier_at_all_is_told_as_such() -> None:
    for model in ("", "m"):
        with pytest.raises(NoVerifierError):
            choose_verifier([], model)


def test_a_drafter_with_another_tokenizer_comes_last_and_none_is_no_error() -> None:
    other = view("a:1", role=Role.DRAFTER, fingerprint="g")
    same = view("b:1", role=Role.DRAFTER, load=5)
    lookup = view("c:1", "", role=Role.DRAFTER, load=3)
    assert choose_drafter([other, same, lookup], "f") == lookup
    assert choose_drafter([other, same], "f") == same
    assert choose_drafter([other], "f") == other
    assert choose_drafter([other], "f", excluded={"a:1"}) is None
    assert choose_drafter([], "f") is None


def test_a_burst_of_sessions_is_spread_over_drafters_that_have_told_of_none_of_them() -> None:
    views = [view(f"{name}:1", "", role=Role.DRAFTER) for name in "abcd"]
    attached: Counter[str] = Counter()
    for _ in range(64):
        chosen = choose_drafter(views, "f", num_own_sessions=attached)
        assert chosen is not None
        attached[chosen.endpoint] += 1
    assert set(attached.values()) == {16}


def test_a_drafter_that_others_use_too_is_as_busy_as_it_says() -> None:
    views = [view("a:1", role=Role.DRAFTER, load=5), view("b:1", role=Role.DRAFTER, load=1)]
    assert choose_drafter(views, "f", num_own_sessions={"b:1": 4}) == views[1]
    assert choose_drafter(views, "f", num_own_sessions={"b:1": 6}) == views[0]


def test_the_drafter_that_is_expected_to_bring_most_is_chosen_and_load_decides_among_equals() -> None:
    views = [view(f"{name}:1", role=Role.DRAFTER, load=load) for name, load in (("a", 1), ("b", 2), ("c", 3))]
    rates = {"a:1": 40.0, "b:1": 60.0, "c:1": 60.0}
    assert choose_drafter(views, "f", expected_tokens_per_s=lambda one, _: rates[one.endpoint]) == views[1]
    loads: list[int] = []

    def note_load(_: EndpointView, load: int) -> float:
        loads.append(load)
        return 0.0

    choose_drafter(views, "f", num_own_sessions={"c:1": 7}, expected_tokens_per_s=note_load)
    assert loads == [1, 2, 7]
