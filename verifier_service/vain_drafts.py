"""Whether a session's drafts ever take part in its rounds, and how long it had better do without them where they don't.

A drafter that is slower than the verifier's rounds guesses tokens that are decided before its guess is there: work for
both sides, and nothing comes of it. Such a session rests, in rounds, twice as long after each trial in vain; one draft
that takes part ends that, so drafters of which each is good for some sessions find those. Rests of sessions that began
together end apart: else all would try again at once, and find their drafter as busy as before. Pure: counts alone.
"""

MIN_ROUNDS_IN_VAIN = 8
"""A draft in one of so many rounds is worth having."""
TRIAL_ROUNDS = 4
FIRST_REST_ROUNDS, MAX_REST_ROUNDS = 16, 1024
USED_DRAFTS_TO_FORGET = 8
"""So many drafts that took part make the next rest a first one again."""
GOLDEN_RATIO = 0.618


class VainDrafts:
    """Of one attachment. `place` is any number that tells sessions apart."""

    def __init__(self, place: int = 0) -> None:
        self._stretch = 1 + place * GOLDEN_RATIO % 1
        self._num_in_vain = 0
        self._num_used = 0
        self._next_rest = FIRST_REST_ROUNDS
        self._rest_left = 0

    @property
    def is_resting(self) -> bool:
        """Whether the session has no budget for now."""
        return self._rest_left > 0

    def observe_draft(self) -> None:
        """A draft took part in a round, with a node at least."""
        self._num_in_vain = self._rest_left = 0
        self._num_used += 1
        if self._num_used >= USED_DRAFTS_TO_FORGET:
            self._next_rest = FIRST_REST_ROUNDS

    def observe_round_alone(self, *, was_asked: bool) -> None:
        """A round without one; `was_asked`: its drafter had a budget, and the round did not wait."""
        if self._rest_left > 0:
            self._rest_left -= 1
            if self._rest_left == 0:
                self._num_in_vain = MIN_ROUNDS_IN_VAIN - TRIAL_ROUNDS
        elif was_asked:
            self._num_in_vain += 1
            if self._num_in_vain >= MIN_ROUNDS_IN_VAIN:
                self._rest_left = round(self._next_rest * self._stretch)
                self._next_rest = min(2 * self._next_rest, MAX_REST_ROUNDS)
                self._num_used = 0

    def forget(self) -> None:
        """What was seen tells nothing any more."""
        self._num_in_vain = self._num_used = self._rest_left = 0
        self._next_rest = FIRST_REST_ROUNDS
