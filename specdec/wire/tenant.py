"""Whom a call is for: what its credential says, or, where none is asked for, one key of its metadata.

A tenant says whom to be fair to and whose cached prompts may be shared; it is not a credential and allows nothing.
"""

import contextvars
from collections.abc import Iterable

import grpc.aio

from specdec.errors import InvalidParameterError
from specdec.params import validate_tenant
from specdec.wire.interceptors import Context

TENANT_KEY = "specdec-tenant"

_proven_tenant: contextvars.ContextVar[str | None] = contextvars.ContextVar("proven_tenant", default=None)
"""gRPC handles each call in a task of its own, so that it is one call's."""


def tenant_to_metadata(tenant: str) -> grpc.aio.Metadata:
    """Nothing for the tenant without a name."""
    return grpc.aio.Metadata((TENANT_KEY, tenant)) if tenant else grpc.aio.Metadata()


def tenant_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Empty where none is named; raises InvalidParameterError where it is malformed or there are several."""
    named = {value for key, value in metadata or () if key == TENANT_KEY}
    if len(named) > 1:
        raise InvalidParameterError("tenant: one at most", field="tenant")
    return validate_tenant(str(named.pop())) if named else ""


def become_tenant(tenant: str) -> None:
    """A credential has said whom the current call is for: from here on nothing else does."""
    _proven_tenant.set(tenant)


def tenant_of_call(context: Context) -> str:
    """Whom the current call is for; raises InvalidParameterError where it is its metadata that says so, and wrongly."""
    proven = _proven_tenant.get()
    return tenant_from_metadata(context.invocation_metadata()) if proven is None else proven
