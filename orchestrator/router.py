"""Choose a verifier and a drafter for a session. Pure: no Redis, no gRPC, no clock."""

from collections.abc import Collection, Mapping, Sequence

from orchestrator.endpoints import EndpointView
from specdec.errors import InvalidParameterError, NoVerifierError, UnknownModelError

_RETRY_AFTER_S = 1.0


def choose_verifier(
    verifiers: Sequence[EndpointView],
    model: str,
    *,
    excluded: Collection[str] = (),
    num_own_sessions: Mapping[str, int] | None = None,
    numerics_fingerprint: str | None = None,
) -> EndpointView:
    """The least loaded verifier of a model that takes sessions; the first by name among equals.

    Load is what the verifier said last, or what this orchestrator has there now where that is more. With a numerics
    fingerprint only verifiers of the same will do: the session goes on there bit for bit.

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
    own = num_own_sessions or {}
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
    return min(fit, key=lambda view: (_load(view, own), view.endpoint))


def choose_drafter(
    drafters: Sequence[EndpointView],
    tokenizer_fingerprint: str,
    *,
    excluded: Collection[str] = (),
    num_own_sessions: Mapping[str, int] | None = None,
) -> EndpointView | None:
    """The least loaded drafter that takes sessions, None where there is none; load as for a verifier.

    One with another tokenizer comes last: it is refused at attach, and that tells the operator why.
    """

    def unfit(view: EndpointView) -> bool:
        model = view.status.model if view.status is not None else None
        return bool(model and model.tokenizer_fingerprint and model.tokenizer_fingerprint != tokenizer_fingerprint)

    own = num_own_sessions or {}
    fit = [view for view in drafters if view.takes_sessions and view.endpoint not in excluded]
    return min(fit, key=lambda view: (unfit(view), _load(view, own), view.endpoint), default=None)


def _model_of(view: EndpointView) -> str:
    return view.status.model.name if view.status is not None and view.status.model is not None else ""


def _numerics_of(view: EndpointView) -> str | None:
    numerics = view.status.model.numerics if view.status is not None and view.status.model is not None else None
    return numerics.fingerprint if numerics is not None else None


def _load(view: EndpointView, num_own_sessions: Mapping[str, int]) -> int:
    own = num_own_sessions.get(view.endpoint, 0)
    if view.status is None:
        return own
    return max(own, view.status.load.num_active_sessions + view.status.load.num_waiting_sessions)
