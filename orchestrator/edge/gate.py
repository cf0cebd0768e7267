"""The gate before a client's call: a credential, the tenant that it names, the scope that the call needs, and no more
calls of one address than there may be.

Without credentials configured everyone is let in and says for which tenant, as on a trusted network.
"""

import contextlib
from collections.abc import Iterator

from orchestrator.edge.bearer_tokens import BearerTokens
from orchestrator.edge.caller import ADMIN_SCOPE, Caller
from orchestrator.edge.json_web_tokens import Issuer, JsonWebTokens
from specdec.config import OrchestratorSettings
from specdec.errors import PermissionDeniedError, UnauthenticatedError
from specdec.wire.gate import HEALTH_PREFIX
from specdec.wire.interceptors import Context
from specdec.wire.stream_counts import StreamCounts
from specdec.wire.tenant import become_tenant, tenant_from_metadata

_ADMIN_PREFIX = "/specdec.v1.AdminService/"
_AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "


class EdgeGate:
    """`tokens` and `web_tokens`: None where clients have none of that kind."""

    def __init__(
        self, *, tokens: BearerTokens | None, web_tokens: JsonWebTokens | None, max_streams_per_peer: int
    ) -> None:
        self._tokens = tokens
        self._web_tokens = web_tokens
        self._streams_of = StreamCounts(max_streams_per_peer)

    @contextlib.contextmanager
    def admit(self, method: str, context: Context) -> Iterator[None]:
        """Raises UnauthenticatedError, PermissionDeniedError, TooManyStreamsError."""
        if not method.startswith(HEALTH_PREFIX):  # load balancers have no credentials
            self._authorise(method, context)
        with self._streams_of.one_more(context.peer()):
            yield

    def _authorise(self, method: str, context: Context) -> None:
        if self._tokens is None and self._web_tokens is None:
            return
        caller = self._caller_of(_bearer_token(context))
        if method.startswith(_ADMIN_PREFIX) and ADMIN_SCOPE not in caller.scopes:
            raise PermissionDeniedError(f"that needs the scope {ADMIN_SCOPE}", scope=ADMIN_SCOPE)
        named = tenant_from_metadata(context.invocation_metadata())
        if named and named != caller.tenant:
            raise PermissionDeniedError("the credential is for another tenant than the call")
        become_tenant(caller.tenant)

    def _caller_of(self, token: str) -> Caller:
        caller = self._tokens.caller_of(token) if self._tokens is not None else None
        if caller is not None:
            return caller
        if self._web_tokens is not None:
            return self._web_tokens.caller_of(token)
        raise UnauthenticatedError("the token is not known")


def edge_gate(settings: OrchestratorSettings) -> EdgeGate:
    """As the settings say. Raises OSError, UnusableFileError for files that cannot be used."""
    web_tokens = None
    if settings.auth_jwks is not None:
        issuer = Issuer(
            settings.auth_jwt_issuer,
            settings.auth_jwt_audience,
            settings.auth_jwt_tenant_claim,
            settings.auth_jwt_leeway_s,
        )
        web_tokens = JsonWebTokens(settings.auth_jwks, issuer)
    return EdgeGate(
        tokens=None if settings.auth_tokens is None else BearerTokens(settings.auth_tokens),
        web_tokens=web_tokens,
        max_streams_per_peer=settings.max_streams_per_peer,
    )


def _bearer_token(context: Context) -> str:
    given = [value for key, value in context.invocation_metadata() or () if key == _AUTHORIZATION_KEY]
    if len(given) != 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_SCHEME):
        raise UnauthenticatedError("the call needs one bearer token in its metadata: authorization: Bearer ...")
    return given[0][len(_SCHEME) :].strip()
