"""Whom a call is for: one key of its metadata.

A tenant says whom to be fair to and whose cached prompts may be shared; it is not a credential and allows nothing.
"""

from collections.abc import Iterable

import grpc.aio

from specdec.errors import InvalidParameterError
from specdec.params import validate_tenant

TENANT_KEY = "specdec-tenant"


def tenant_to_metadata(tenant: str) -> grpc.aio.Metadata:
    """Nothing for the tenant without a name."""
    return grpc.aio.Metadata((TENANT_KEY, tenant)) if tenant else grpc.aio.Metadata()


def tenant_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Empty where none is named; raises InvalidParameterError where it is malformed or there are several."""
    named = {value for key, value in metadata or () if key == TENANT_KEY}
    if len(named) > 1:
        raise InvalidParameterError("tenant: one at most", field="tenant")
    return validate_tenant(str(named.pop())) if named else ""
