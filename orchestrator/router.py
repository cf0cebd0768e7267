"""Choose a verifier and a drafter for a session. Pure: no Redis, no gRPC, no clock, no dice.

The figures of both rules, and how far they are from the best choice, are in docs/adr/0017.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.endpoints import EndpointView
from specdec.errors import InvalidParameterError, NoVerifierError, UnknownModelError

_RETRY_AFTER_S = 1.0
_OUTPUT_TOKENS = 256
"""What a session costs besides its prompt, in prompt tokens: a hit on a short prompt saves next to nothing of that."""
_AFFINITY_SESSIONS, _AFFINITY_SHARE = 4.0, 0.5
"""For a hit that saves everything a verifier may be ahead of the others by so many sessions, and this part of the mean
pressure. So a popular prompt fills its verifier that far and then begins to live on a second one."""
_LIKELY_SHARE = 0.75
"""Of a prompt that this orchestrator sent nowhere, where others would have sent it."""
_MAX_QUEUE_WAIT_S = 0.5
_MIN_FREE_SHARE = 0.05
_MAX_SLOWNESS = 8.0
_BASE_SESSIONS = 8
"""What an idle verifier's forward pass costs, in sessions: reading its weights takes as long as that many rows."""


@dataclass(frozen=True)
class SessionNeeds:
    """What a session is to a verifier, and what is known of the verifiers besides what they told.

    Attributes:
        num_prompt_tokens: 0 where it is not known.
        cached_tokens: of the prompt, by verifier, how many it is likely to have in its cache.
        num_new_sessions: by verifier, those that were sent there since it told of its load, by others too.
        forward_s: by verifier, how long a forward pass takes there, where that is known.
        beginning: names how the prompt begins, alike at every orchestrator; empty where it is too short to matter.
        tie_breaker: anything that differs from session to session: equals are then taken in turn, not all by one.
    """

    num_prompt_tokens: int = 0
    cached_tokens: Mapping[str, float] | None = None
    num_new_sessions: Mapping[str, float] | None = None
    forward_s: Mapping[str, float] | None = None
    beginning: str = ""
    tie_breaker: str = ""


def choose_verifier(
    verifiers: Sequence[EndpointView],
    model: str,
    *,
    excluded: Collection[str] = (),
    num_own_sessions: Mapping[str, int] | None = None,
    numerics_fingerprint: str | None = None,
    needs: SessionNeeds | None = None,
) -> EndpointView:
    """The verifier of a model that takes sessions where one more costs least.

    A session's cost is the load that it meets: sessions there (what the verifier said last and those sent since, or
    what this orchestrator has there now where that is more; waiting ones twice, for their prompts are still to come),
    times how much slower than others the verifier is, over the part of its blocks that is free. What its cache saves
    is taken off, bounded, so that a popular prompt cannot overload one verifier. Those that have no room come last.
    With a numerics fingerprint only verifiers of the same will do: the session goes on there bit for bit.

    Raises:
        UnknownModelError: verifiers are known, and none holds the model.
        InvalidParameterError: no model was named and there are several.
        NoVerifierError: none takes sessions now.
    """
    models = {_model_of(view) for view in verifiers if view.status is not None} - {""}
    if model == "" and len(models) > 1:
        raise InvalidParameterError("several models are served: name one", field="model")
    # A verifier that has not told its model yet may turn out to be the one that is asked for.
    if model != "" and models and model not in models and all(_model_of(view) for view in verifiers):
        raise UnknownModelError(f"the models are: {', '.join(sorted(models))}")
    fit = [
        view
        for view in verifiers
        if view.takes_sessions
        and view.endpoint not in excluded
        and model in ("", _model_of(view))
        and numerics_fingerprint in (None, _numerics_of(view))
    ]
    if not fit:
        raise NoVerifierError("no verifier can take the session now", retry_after_s=_RETRY_AFTER_S)
    needs, own = needs or SessionNeeds(), num_own_sessions or {}
    pressure = _pressures(fit, own, needs)
    allowance = _AFFINITY_SESSIONS + _AFFINITY_SHARE * sum(pressure.values()) / len(pressure)
    cached_tokens = needs.cached_tokens or _likely_tokens(fit, needs)

    def cost(view: EndpointView) -> float:
        saved = cached_tokens.get(view.endpoint, 0) / (needs.num_prompt_tokens + _OUTPUT_TOKENS)
        return pressure[view.endpoint] - allowance * saved

    return min(fit, key=lambda view: (_is_full(view, needs), cost(view), _turn(view.endpoint, needs.tie_breaker)))


def choose_drafter(
    drafters: Sequence[EndpointView],
    tokenizer_fingerprint: str,
    *,
    excluded: Collection[str] = (),
    num_own_sessions: Mapping[str, int] | None = None,
    expected_tokens_per_s: Callable[[EndpointView, int], float] | None = None,
) -> EndpointView | None:
    """The drafter that takes sessions and from which most tokens a second are expected, None where there is none.

    `expected_tokens_per_s` tells that of a drafter and the sessions that it has now; without it, or among equals, it is
    the least loaded. Load is what the drafter said last, or what this orchestrator has there now where that is more.
    One with another tokenizer comes last: it is refused at attach, and that tells the operator why.
    """

    def unfit(view: EndpointView) -> bool:
        model = view.status.model if view.status is not None else None
        return bool(model and model.tokenizer_fingerprint and model.tokenizer_fingerprint != tokenizer_fingerprint)

    def rank(view: EndpointView) -> tuple[bool, float, int, str]:
        load = max((num_own_sessions or {}).get(view.endpoint, 0), num_reported_sessions(view))
        expected = expected_tokens_per_s(view, load) if expected_tokens_per_s is not None else 0.0
        return unfit(view), -expected, load, view.endpoint

    fit = [view for view in drafters if view.takes_sessions and view.endpoint not in excluded]
    return min(fit, key=rank, default=None)


def num_reported_sessions(view: EndpointView) -> int:
    """Sessions that a server told of at the last look, waiting ones too."""
    if view.status is None:
        return 0
    return view.status.load.num_active_sessions + view.status.load.num_waiting_sessions


def _pressures(fit: Sequence[EndpointView], own: Mapping[str, int], needs: SessionNeeds) -> dict[str, float]:
    """The load that one more session would meet, by endpoint, in sessions on a verifier of mean speed."""
    forward_s = needs.forward_s or {}
    known = [forward_s[view.endpoint] for view in fit if forward_s.get(view.endpoint)]
    mean_forward_s = sum(known) / len(known) if known else 1.0
    pressures = {}
    for view in fit:
        num_new = (needs.num_new_sessions or {}).get(view.endpoint, 0.0)
        num_waiting = view.status.load.num_waiting_sessions if view.status is not None else 0
        num_sessions = max(own.get(view.endpoint, 0), num_reported_sessions(view) + num_new) + num_waiting
        slowness = forward_s.get(view.endpoint, mean_forward_s) / mean_forward_s
        slowness = min(max(slowness, 1 / _MAX_SLOWNESS), _MAX_SLOWNESS)
        free = max(1 - _used_share(view, num_new), _MIN_FREE_SHARE)
        pressures[view.endpoint] = (num_sessions + _BASE_SESSIONS) * slowness / free
    return pressures


def _used_share(view: EndpointView, num_new_sessions: float) -> float:
    """Of the verifier's blocks, new sessions taken to need as much as the others; 0 where its cache has no limit."""
    load = view.status.load if view.status is not None else None
    if load is None or load.kv_budget_bytes <= 0:
        return 0.0
    per_session_bytes = load.kv_used_bytes / max(1, load.num_active_sessions)
    return (load.kv_used_bytes + num_new_sessions * per_session_bytes) / load.kv_budget_bytes


def _is_full(view: EndpointView, needs: SessionNeeds) -> bool:
    """One more session would wait for its turn."""
    if view.status is not None and view.status.load.queue_wait_s > _MAX_QUEUE_WAIT_S:
        return True
    return _used_share(view, (needs.num_new_sessions or {}).get(view.endpoint, 0.0) + 1) > 1


def _likely_tokens(fit: Sequence[EndpointView], needs: SessionNeeds) -> dict[str, float]:
    """Of a prompt that was sent nowhere from here, what each verifier may have of it through other orchestrators.

    They agree without a word on an order of the verifiers for each beginning, and try them in that order.
    """
    if needs.beginning == "":
        return {}
    order = sorted(fit, key=lambda view: _turn(view.endpoint, needs.beginning))
    return {view.endpoint: _LIKELY_SHARE * needs.num_prompt_tokens / (rank + 1) for rank, view in enumerate(order)}


def _turn(endpoint: str, tie_breaker: str) -> tuple[bytes, str]:
    """Rendezvous hashing: an order of the endpoints for each tie breaker, and by name without one."""
    if tie_breaker == "":
        return b"", endpoint
    return hashlib.blake2b(f"{endpoint} {tie_breaker}".encode(), digest_size=8).digest(), endpoint


def _model_of(view: EndpointView) -> str:
    return view.status.model.name if view.status is not None and view.status.model is not None else ""


def _numerics_of(view: EndpointView) -> str | None:
    numerics = view.status.model.numerics if view.status is not None and view.status.model is not None else None
    return numerics.fingerprint if numerics is not None else None
