"""Whoever called, once a credential has said so."""

import dataclasses

ADMIN_SCOPE = "admin"


@dataclasses.dataclass(frozen=True)
class Caller:
    """What a credential says: whom the calls are for, and what besides generation they may do."""

    tenant: str
    scopes: frozenset[str]
