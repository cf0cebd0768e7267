"""Durations, timestamps, ids and byte strings: checked one by one."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from specdec.errors import InvalidParameterError, MalformedRequestError
from specdec.ids import SessionId
from specdec.params import validate_session_id

MAX_DURATION_S = 315_576_000_000
"""Ten thousand years: the bound of google.protobuf.Duration itself."""
NANOS_PER_S = 1_000_000_000


def duration_to_pb(seconds: float) -> Duration:
    """Raises ValueError for a time that is negative, not finite or beyond MAX_DURATION_S."""
    if not 0 <= seconds <= MAX_DURATION_S:  # no comparison holds for what is no number
        raise ValueError(f"not a duration: {seconds}")
    whole_s, nanos = divmod(round(seconds * NANOS_PER_S), NANOS_PER_S)
    return Duration(seconds=whole_s, nanos=nanos)


def optional_duration_to_pb(seconds: float | None) -> Duration | None:
    """Absent stays absent."""
    return None if seconds is None else duration_to_pb(seconds)


def duration_from_pb(duration: Duration, field: str) -> float:
    """Seconds; raises InvalidParameterError where it is negative or its parts are out of range."""
    seconds = duration.seconds + duration.nanos / NANOS_PER_S
    if not (duration.seconds >= 0 and 0 <= duration.nanos < NANOS_PER_S and seconds <= MAX_DURATION_S):
        raise InvalidParameterError(f"{field}: must be a duration of at least 0", field=field)
    return seconds


def timestamp_to_pb(unix_s: float) -> Timestamp:
    """Seconds since 1970, UTC."""
    whole_s, nanos = divmod(round(unix_s * NANOS_PER_S), NANOS_PER_S)
    return Timestamp(seconds=whole_s, nanos=nanos)


def timestamp_from_pb(timestamp: Timestamp, field: str) -> float:
    """Seconds since 1970; raises InvalidParameterError where it is before that or its parts are out of range."""
    return duration_from_pb(Duration(seconds=timestamp.seconds, nanos=timestamp.nanos), field)


def session_id_from_pb(session_id: str) -> SessionId:
    """Raises InvalidParameterError as `validate_session_id` does."""
    return SessionId(validate_session_id(session_id))


def bytes_from_pb(value: bytes, field: str, low: int, high: int) -> bytes:
    """Raises MalformedRequestError where there are fewer than `low` or more than `high` bytes."""
    if not low <= len(value) <= high:
        raise MalformedRequestError(f"{field}: {low} to {high} bytes", field=field)
    return value


def natural_from_pb(value: int, field: str, low: int = 0, high: int | None = None) -> int:
    """Raises MalformedRequestError where the value is below `low` or above `high`."""
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise MalformedRequestError(f"{field}: must be {allowed}", field=field)
    return value
