"""Orchestrators that share one session store, as a client knows them: what it asks any of them, and after which errors
it comes again with what it has received. Knows no connection and no pause."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from specdec.errors import (
    DrainingError,
    LoadingError,
    NoVerifierError,
    NumericsUnavailableError,
    OverloadedError,
    PeerUnavailableError,
    RateLimitedError,
    StoreUnavailableError,
    TooManyStreamsError,
    VerifierLostError,
)
from specdec.ids import SessionId
from specdec.messages import GenerationEvent
from specdec.params import GenerationSpec

ELSEWHERE = (PeerUnavailableError, DrainingError)
"""This replica is not there, another may be: also before a session has begun."""
RESUMABLE = (
    *ELSEWHERE,
    LoadingError,
    NoVerifierError,
    NumericsUnavailableError,
    OverloadedError,
    RateLimitedError,
    StoreUnavailableError,
    TooManyStreamsError,
    VerifierLostError,
)
"""Once a session has begun. Not after FENCED: somebody else has resumed it, and would be fenced in turn."""


class Replica(Protocol):
    """One of them."""

    def generate(self, spec: GenerationSpec, session_id: str = "") -> AsyncGenerator[GenerationEvent, None]: ...

    def resume(
        self, session_id: SessionId, received_token_ids: Sequence[int], spec: GenerationSpec
    ) -> AsyncGenerator[GenerationEvent, None]: ...
