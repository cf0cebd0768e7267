"""specdec.messages and specdec.params to protobuf and back. The only place that knows both.

`x_to_pb` never fails on a valid dataclass. `x_from_pb` trusts nothing: what is malformed raises MalformedRequestError
or InvalidParameterError, and sequences come back as tuples. Ranges of sampling parameters are left to `validated()`.
"""

from specdec.wire.convert.drafting import (
    verify_request_from_pb,
    verify_request_to_pb,
    verify_response_from_pb,
    verify_response_to_pb,
)
from specdec.wire.convert.generation import (
    attach_session_from_pb,
    attach_session_to_pb,
    generation_event_from_pb,
    generation_event_to_pb,
)
from specdec.wire.convert.params import (
    generation_spec_from_pb,
    generation_spec_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    speculation_from_pb,
    speculation_to_pb,
    stop_from_pb,
    stop_to_pb,
)
from specdec.wire.convert.scalars import (
    duration_from_pb,
    duration_to_pb,
    session_id_from_pb,
    timestamp_to_pb,
)
from specdec.wire.convert.sessions import (
    open_session_from_pb,
    open_session_to_pb,
    session_event_from_pb,
    session_event_to_pb,
)
from specdec.wire.convert.statistics import (
    round_statistics_from_pb,
    round_statistics_to_pb,
    speculative_statistics_from_pb,
    speculative_statistics_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from specdec.wire.convert.status import (
    model_info_from_pb,
    model_info_to_pb,
    numerics_from_pb,
    numerics_to_pb,
    server_status_from_pb,
    server_status_to_pb,
)

__all__ = [
    "attach_session_from_pb",
    "attach_session_to_pb",
    "duration_from_pb",
    "duration_to_pb",
    "generation_event_from_pb",
    "generation_event_to_pb",
    "generation_spec_from_pb",
    "generation_spec_to_pb",
    "model_info_from_pb",
    "model_info_to_pb",
    "numerics_from_pb",
    "numerics_to_pb",
    "open_session_from_pb",
    "open_session_to_pb",
    "round_statistics_from_pb",
    "round_statistics_to_pb",
    "sampling_from_pb",
    "sampling_to_pb",
    "server_status_from_pb",
    "server_status_to_pb",
    "session_event_from_pb",
    "session_event_to_pb",
    "session_id_from_pb",
    "speculation_from_pb",
    "speculation_to_pb",
    "speculative_statistics_from_pb",
    "speculative_statistics_to_pb",
    "stop_from_pb",
    "stop_to_pb",
    "timestamp_to_pb",
    "usage_from_pb",
    "usage_to_pb",
    "verify_request_from_pb",
    "verify_request_to_pb",
    "verify_response_from_pb",
    "verify_response_to_pb",
]
