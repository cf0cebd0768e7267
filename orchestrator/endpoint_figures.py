"""How fast each server was lately and how many of its drafts were accepted, from the frames that clients were sent.

For people who look: what the router goes by is in measurements.py. Pure: times are arguments. Knows endpoints as names.
"""

import dataclasses
from collections import deque

from specdec.messages import Delta

_WINDOW_S = 10
MAX_ENDPOINTS = 1024


@dataclasses.dataclass
class _Second:
    at_s: int
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Figures:
    """`acceptance_rate` is None where nothing was drafted."""

    tokens_per_s: float = 0.0
    acceptance_rate: float | None = None


class EndpointFigures:
    """Of the last ten seconds. Remembers so many endpoints; the ones that were silent longest are forgotten first."""

    def __init__(self, max_endpoints: int = MAX_ENDPOINTS) -> None:
        self._max_endpoints = max_endpoints
        self._seconds: dict[str, deque[_Second]] = {}

    def __len__(self) -> int:
        return len(self._seconds)

    def note(self, delta: Delta, endpoints: tuple[str, ...], now_s: float) -> None:
        """Tokens that servers brought together; empty names are nobody."""
        for endpoint in endpoints:
            if not endpoint:
                continue
            seconds = self._seconds.pop(endpoint, None) or deque(maxlen=_WINDOW_S + 1)
            self._seconds[endpoint] = seconds  # the newest last
            if not seconds or seconds[-1].at_s != int(now_s):
                seconds.append(_Second(int(now_s)))
            seconds[-1].num_tokens += len(delta.token_ids)
            seconds[-1].num_draft_tokens += delta.round.num_draft_tokens
            seconds[-1].num_accepted_tokens += delta.round.num_accepted_tokens
        while len(self._seconds) > self._max_endpoints:
            del self._seconds[next(iter(self._seconds))]

    def of(self, endpoint: str, now_s: float) -> Figures:
        recent = [second for second in self._seconds.get(endpoint, ()) if second.at_s >= now_s - _WINDOW_S]
        if not recent:
            return Figures()
        num_draft_tokens = sum(second.num_draft_tokens for second in recent)
        num_accepted_tokens = sum(second.num_accepted_tokens for second in recent)
        lasted_s = max(1.0, now_s - recent[0].at_s)
        return Figures(
            sum(second.num_tokens for second in recent) / lasted_s,
            num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
        )
