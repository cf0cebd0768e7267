"""What a campaign notes of each fault. Pure."""

import dataclasses
from collections.abc import Sequence

from specdec.bench.faults.kinds import FaultKind
from specdec.bench.faults.stream import Output


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """A fault as it was injected. Times are seconds of `time.monotonic`.

    Attributes:
        target: name of the process that was struck, or that listens at the link.
        source: name of the process that connects, of a link; empty else.
        struck_until_s: what it touches, it touches before then: at once, or by the end of a drain.
        cleared_s: all that was struck served again.
        affected: outputs on their way through what was struck, at that moment.
        error: why the system did not come back from it; empty if it did.
    """

    number: int
    kind: FaultKind
    target: str
    source: str
    began_s: float
    struck_until_s: float
    cleared_s: float
    affected: Sequence[Output]
    error: str = ""


@dataclasses.dataclass(frozen=True)
class LeftOver:
    """What the system holds when every client is gone. All of it should be nothing.

    Attributes:
        num_keys_without_expiry: keys of the store that nobody would ever remove.
        num_keys_after_expiry: keys of the store once a session's time to live has passed.
        num_processes: processes of the system that are there after it was stopped.
        unexpected_ends: processes that ended though nobody killed them, or that did not end in order when told to.
    """

    num_sessions: int = 0
    num_attachments: int = 0
    kv_bytes: int = 0
    num_keys_without_expiry: int = 0
    num_keys_after_expiry: int = 0
    num_processes: int = 0
    unexpected_ends: tuple[str, ...] = ()
