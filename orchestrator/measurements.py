"""What drafters bring, measured from the rounds of sessions: accepted tokens by tenant, latency by verifier.

Averages whose newest values count most, each with its weight: evidence fades with time, and where there is little, what
is known more generally stands in, then a guess. Pure: times are arguments. Knows nothing of who is free or healthy.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from specdec.messages import RoundStatistics

_MAX_WEIGHT = 64.0
"""In rounds: about a session's worth. What is older counts for little."""
_HALF_LIFE_S = 300.0
"""Of a weight: a drafter that was poor is worth another try after some minutes."""
_FADES_EVERY_S = 1.0
_PRIOR_WEIGHT = 8.0
"""Rounds that must be measured until a measurement counts for more than what stood in for it."""
_PRIOR_ACCEPTED_TOKENS = 1.5
_PRIOR_LATENCY_S = 0.010
_PRIOR_FORWARD_S = 0.030
_OPTIMISM = 0.5
"""How much more than is known an unmeasured drafter is believed to bring, as a part of it."""
_HANDLING_S = 0.0003
"""What each further session costs a drafter at least, whatever its way to guess: a message in, a message out."""


@dataclass
class _Average:
    value: float = 0.0
    weight: float = 0.0
    at: float = 0.0

    def observe(self, value: float, now: float) -> None:
        if now > self.at + _FADES_EVERY_S:
            self.weight, self.at = self.weight_at(now), now
        self.weight = min(self.weight + 1, _MAX_WEIGHT)
        self.value += (value - self.value) / self.weight

    def weight_at(self, now: float) -> float:
        return self.weight * math.exp2(-max(0.0, now - self.at) / _HALF_LIFE_S)

    def with_prior(self, prior: float, now: float) -> float:
        weight = self.weight_at(now)
        return (weight * self.value + _PRIOR_WEIGHT * prior) / (weight + _PRIOR_WEIGHT)


_UNKNOWN = _Average()


class Measurements:
    """At most `capacity` averages, those that were used least recently go first."""

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._averages: OrderedDict[tuple[str, ...], _Average] = OrderedDict()

    def __len__(self) -> int:
        return len(self._averages)

    def note(self, drafter: str, verifier: str, tenant: str, statistics: RoundStatistics, now: float) -> None:
        """A round of a session was committed; `drafter` is empty where none is attached.

        Only rounds that had a draft, or waited for one, tell of the drafter: the others were not meant to have any.
        """
        if statistics.verify_forward_time_s > 0:
            self._observe(("forward", verifier), statistics.verify_forward_time_s, now)
        if drafter == "" or (statistics.draft_time_s is None and not statistics.fallback_decode):
            return
        self._observe(("accepted", drafter), statistics.num_accepted_tokens, now)
        self._observe(("accepted", drafter, tenant), statistics.num_accepted_tokens, now)
        if statistics.draft_time_s is not None:
            self._observe(("draft time", drafter), statistics.draft_time_s, now)
        if statistics.round_trip_time_s is not None:
            self._observe(("round trip", drafter), statistics.round_trip_time_s, now)
            self._observe(("round trip", drafter, verifier), statistics.round_trip_time_s, now)

    def forward_s(self, verifier: str, now: float) -> float | None:
        """A forward pass of the verifier, None before any was seen."""
        average = self._averages.get(("forward", verifier))
        return average.value if average is not None else None

    def expected_tokens_per_s(
        self,
        drafter: str,
        verifier: str,
        tenant: str,
        now: float,
        *,
        num_reported: int = 0,
        num_sessions: int = 0,
        round_trip_time_s: float | None = None,
    ) -> float:
        """What one more session of the tenant would decide a second with this drafter at this verifier.

        A round takes a forward pass and what its draft takes to come; it decides the accepted tokens and one more.
        Draft times were measured while the drafter had `num_reported` sessions, and grow in proportion to what it will
        have with `num_sessions` that it has now and this one. `round_trip_time_s` to the drafter stands in for an
        unmeasured one to the verifier. What is little known is believed to be better than what is known, so that it is
        tried, and the less the more sessions try it already.
        """
        get = self._averages.get
        anywhere = get(("accepted", drafter), _UNKNOWN).with_prior(_PRIOR_ACCEPTED_TOKENS, now)
        here = get(("accepted", drafter, tenant), _UNKNOWN)
        accepted = here.with_prior(anywhere, now)
        unknown = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + here.weight_at(now))
        accepted *= 1 + _OPTIMISM * unknown / (1 + num_sessions)
        prior_s = round_trip_time_s if round_trip_time_s is not None else _PRIOR_LATENCY_S
        anywhere_s = get(("round trip", drafter), _UNKNOWN).with_prior(prior_s, now)
        trip_s = get(("round trip", drafter, verifier), _UNKNOWN).with_prior(anywhere_s, now)
        draft_s = get(("draft time", drafter), _UNKNOWN).with_prior(_PRIOR_LATENCY_S, now)
        draft_s *= (num_sessions + 1) / max(1, num_reported)
        forward_s = self.forward_s(verifier, now) or _PRIOR_FORWARD_S
        return (1 + accepted) / (forward_s + trip_s + draft_s + num_sessions * _HANDLING_S)

    def _observe(self, key: tuple[str, ...], value: float, now: float) -> None:
        average = self._averages.get(key)
        if average is None:
            average = self._averages[key] = _Average(at=now)
            if len(self._averages) > self._capacity:
                self._averages.popitem(last=False)
        else:
            self._averages.move_to_end(key)
        average.observe(value, now)
