"""Requests that would only wait and fail are refused from what verifiers said of their queues."""

import pytest

from orchestrator.endpoints import EndpointView
from orchestrator.shedding import require_room
from specdec.errors import OverloadedError
from specdec.messages import Load, ModelInfo, ServerStatus
from specdec.messages.cluster import Role


def verifier(load: Load, *, model: str = "m", healthy: bool = True, drained: bool = False) -> EndpointView:
    status = ServerStatus(True, False, "0", 1, model=ModelInfo(model, 10, 100, ""), load=load)
    return EndpointView(f"v{id(load)}:1", Role.VERIFIER, healthy=healthy, drained=drained, status=status)


def queue(num_waiting: int, max_waiting: int | None = 16, wait_s: float = 0.0) -> Load:
    return Load(4, num_waiting, max_waiting_sessions=max_waiting, queue_wait_s=wait_s)


FULL = queue(16, wait_s=8.0)
SHORT = queue(2, wait_s=1.0)


def refusal(
    *verifiers: EndpointView,
    model: str = "m",
    num_sessions: int = 1,
    time_left_s: float | None = None,
    resumes: bool = False,
) -> OverloadedError | None:
    try:
        require_room(verifiers, model, num_sessions, time_left_s, resumes=resumes)
    except OverloadedError as error:
        return error
    return None


def test_one_verifier_with_room_is_enough() -> None:
    assert refusal(verifier(FULL), verifier(SHORT)) is None


def test_where_every_queue_is_full_the_time_is_told_at_which_one_has_moved_on() -> None:
    refused = refusal(verifier(FULL), verifier(queue(16, wait_s=80.0)))
    assert refused is not None
    # 14 places are for new sessions: three must leave the queue, one every half second.
    assert refused.retry_after_s == pytest.approx(1.5)


def test_some_places_are_left_to_sessions_that_go_on() -> None:
    nearly_full = verifier(queue(14, wait_s=7.0))
    assert refusal(nearly_full) is not None
    assert refusal(nearly_full, resumes=True) is None
    assert refusal(verifier(FULL), resumes=True) is not None


def test_who_has_less_time_than_the_queue_takes_is_refused_at_once() -> None:
    refused = refusal(verifier(queue(8, wait_s=4.0)), verifier(queue(8, wait_s=3.0)), time_left_s=2.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(1.0)
    assert refusal(verifier(queue(8, wait_s=3.0)), time_left_s=3.5) is None
    assert refusal(verifier(queue(8, wait_s=3.0))) is None


def test_all_samples_of_a_request_need_a_place() -> None:
    assert refusal(verifier(queue(8, wait_s=1.0)), num_sessions=6) is None
    assert refusal(verifier(queue(8, wait_s=1.0)), num_sessions=7) is not None
    assert refusal(verifier(queue(0)), num_sessions=64) is None  # nobody waits: there may be room to run


def test_only_verifiers_that_may_serve_the_request_count() -> None:
    assert refusal(verifier(FULL), verifier(SHORT, model="other")) is not None
    assert refusal(verifier(FULL), verifier(SHORT, model="other"), model="") is None
    assert refusal(verifier(FULL), verifier(SHORT, healthy=False)) is not None
    assert refusal(verifier(FULL), verifier(SHORT, drained=True)) is not None


def test_where_no_verifier_is_known_or_tells_nothing_is_refused() -> None:
    assert refusal() is None
    assert refusal(verifier(queue(500, max_waiting=None))) is None
    assert refusal(verifier(queue(0, max_waiting=0))) is None
