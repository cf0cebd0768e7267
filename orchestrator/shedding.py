"""Whether a request would only wait and fail. Pure: from what the verifiers said of their queues at the last look.

Asked before anything of the request is claimed or opened. Where no verifier is there at all, it says nothing: who looks
for one tells that better.
"""

from collections.abc import Sequence

from orchestrator.endpoints import EndpointView
from orchestrator.retry_after import bounded_retry_after_s
from specdec.errors import OverloadedError
from specdec.messages import Load

RESERVED_SHARE = 8
"""One in so many places of a queue is left to sessions that ran before and are to go on."""


def require_room(
    verifiers: Sequence[EndpointView], model: str, num_sessions: int, remaining_s: float | None, *, resumes: bool
) -> None:
    """Raises OverloadedError where every verifier of the model has a full queue, or lets wait longer than
    `remaining_s`, the time until the caller's deadline (None: it has none). `retry_after_s` is when that will be
    otherwise at the pace of the queues' last admissions."""
    loads = [
        view.status.load
        for view in verifiers
        if view.takes_sessions
        and view.status is not None
        and (model == "" or view.status.model is None or view.status.model.name == model)
    ]
    if not loads:
        return
    with_room = [load for load in loads if _num_too_many(load, num_sessions, resumes=resumes) <= 0]
    if not with_room:
        wait_s = min(_until_shorter(load, _num_too_many(load, num_sessions, resumes=resumes)) for load in loads)
        raise OverloadedError("the queue of every verifier is full", retry_after_s=bounded_retry_after_s(wait_s))
    wait_s = min(load.queue_wait_s for load in with_room)
    if remaining_s is not None and 0 < remaining_s < wait_s:
        told = f"a session would wait for {wait_s:.1f} s and its deadline is in {remaining_s:.1f} s"
        raise OverloadedError(told, retry_after_s=bounded_retry_after_s(wait_s - remaining_s))


def _num_too_many(load: Load, num_sessions: int, *, resumes: bool) -> int:
    """Sessions that would not find a place; an empty queue takes any number, for then there may be room to run."""
    if load.max_waiting_sessions is None or load.num_waiting_sessions == 0:
        return 0
    num_places = load.max_waiting_sessions
    if not resumes:
        num_places -= num_places // RESERVED_SHARE
    return load.num_waiting_sessions + num_sessions - num_places


def _until_shorter(load: Load, num_sessions: int) -> float:
    """Until so many have left the queue."""
    return num_sessions * load.queue_wait_s / load.num_waiting_sessions
