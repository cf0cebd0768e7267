"""The error tree. Domain code raises; one interceptor maps to google.rpc.Status; nobody parses a message text.

Each class fixes its reason (an entry of specdec.v1.ErrorReason without the prefix) and its gRPC status code by name,
so that domain code needs neither protobuf nor grpc.
"""

from typing import ClassVar


class SpecdecError(Exception):
    """Base of all errors that cross a wire. `metadata` holds short machine-readable facts, never prompt text."""

    reason: ClassVar[str] = "INTERNAL"
    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata
        self.retry_after_s = retry_after_s


class EmptyPromptError(SpecdecError):
    reason = "EMPTY_PROMPT"
    status = "INVALID_ARGUMENT"


class PromptTooLongError(SpecdecError):
    reason = "PROMPT_TOO_LONG"
    status = "INVALID_ARGUMENT"


class TokenOutOfVocabularyError(SpecdecError):
    reason = "TOKEN_OUT_OF_VOCABULARY"
    status = "INVALID_ARGUMENT"


class InvalidParameterError(SpecdecError):
    """A parameter is out of range; `field` in the metadata names it as the proto does."""

    reason = "INVALID_PARAMETER"
    status = "INVALID_ARGUMENT"


class MalformedRequestError(SpecdecError):
    reason = "MALFORMED_REQUEST"
    status = "INVALID_ARGUMENT"


class UnknownModelError(SpecdecError):
    reason = "UNKNOWN_MODEL"
    status = "NOT_FOUND"


class UnknownSessionError(SpecdecError):
    reason = "UNKNOWN_SESSION"
    status = "NOT_FOUND"


class SessionExistsError(SpecdecError):
    reason = "SESSION_EXISTS"
    status = "ALREADY_EXISTS"


class MessageTooLargeError(SpecdecError):
    reason = "MESSAGE_TOO_LARGE"
    status = "RESOURCE_EXHAUSTED"


class OverloadedError(SpecdecError):
    reason = "OVERLOADED"
    status = "RESOURCE_EXHAUSTED"


class SlowReaderError(SpecdecError):
    reason = "SLOW_READER"
    status = "RESOURCE_EXHAUSTED"


class NoVerifierError(SpecdecError):
    reason = "NO_VERIFIER"
    status = "UNAVAILABLE"


class VerifierLostError(SpecdecError):
    reason = "VERIFIER_LOST"
    status = "UNAVAILABLE"


class DrainingError(SpecdecError):
    reason = "DRAINING"
    status = "UNAVAILABLE"


class LoadingError(SpecdecError):
    reason = "LOADING"
    status = "UNAVAILABLE"


class StoreUnavailableError(SpecdecError):
    reason = "STORE_UNAVAILABLE"
    status = "UNAVAILABLE"


class PeerUnavailableError(SpecdecError):
    """A server that this one called cannot be reached, or its stream broke."""

    reason = "PEER_UNAVAILABLE"
    status = "UNAVAILABLE"


class FencedError(SpecdecError):
    reason = "FENCED"
    status = "ABORTED"


class ResumeMismatchError(SpecdecError):
    reason = "RESUME_MISMATCH"
    status = "FAILED_PRECONDITION"


class AttachRefusedError(SpecdecError):
    """The verifier refused a drafter; `refusal` in the metadata is the name of an AttachRefusal."""

    reason = "ATTACH_REFUSED"
    status = "FAILED_PRECONDITION"


class RecordUnreadableError(SpecdecError):
    """A session's record was written over by something else, or sealed with a key that is not here."""

    reason = "RECORD_UNREADABLE"
    status = "DATA_LOSS"


class NumericsUnavailableError(SpecdecError):
    """The verifier is lost, none of equal numerics is left, and the request wants no other."""

    reason = "NUMERICS_UNAVAILABLE"
    status = "UNAVAILABLE"


class UnauthenticatedError(SpecdecError):
    reason = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"


class PermissionDeniedError(SpecdecError):
    reason = "PERMISSION_DENIED"
    status = "PERMISSION_DENIED"


class RateLimitedError(SpecdecError):
    reason = "RATE_LIMITED"
    status = "RESOURCE_EXHAUSTED"


class TooManyStreamsError(SpecdecError):
    reason = "TOO_MANY_STREAMS"
    status = "RESOURCE_EXHAUSTED"


class NotOfferedError(SpecdecError):
    reason = "NOT_OFFERED"
    status = "UNIMPLEMENTED"


class DeadlineError(SpecdecError):
    reason = "DEADLINE_EXCEEDED"
    status = "DEADLINE_EXCEEDED"


class ModelLoadError(SpecdecError):
    """A model could not be found, fetched, checked or read. Start-up only."""


class UnusableFileError(ValueError):
    """A file of the operator does not hold what it should; the message names it and quotes nothing. At start-up it ends
    the role, and no caller ever hears of it."""
