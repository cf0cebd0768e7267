"""Counts of one session's speculation. Knows numbers alone."""

import dataclasses

from specdec.messages import RoundStatistics, SpeculativeStatistics


@dataclasses.dataclass
class SpeculationTally:
    """Sums that become the session's SpeculativeStatistics."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = dataclasses.field(default_factory=list)
    drafted_per_pos: list[int] = dataclasses.field(default_factory=list)
    num_rounds: int = 0
    num_stale_drafts: int = 0
    num_refused_drafts: int = 0
    num_fallback_decodes: int = 0
    disabled_reason: str = ""
    had_budget: bool = False
    was_held_back: bool = False
    """A drafter was there and might not draft, since drafts did not pay."""

    def count_round(self, round_statistics: RoundStatistics, draft_depth: int) -> None:
        """Adds a round whose draft was `draft_depth` tokens deep (its length, for a chain)."""
        self.num_rounds += 1
        self.num_fallback_decodes += round_statistics.fallback_decode
        if round_statistics.num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += round_statistics.num_draft_tokens
        self.num_accepted_tokens += round_statistics.num_accepted_tokens
        missing = draft_depth - len(self.drafted_per_pos)
        self.drafted_per_pos += [0] * missing
        self.accepted_per_pos += [0] * missing
        for position in range(draft_depth):
            self.drafted_per_pos[position] += 1
            self.accepted_per_pos[position] += position < round_statistics.num_accepted_tokens

    def frozen(self) -> SpeculativeStatistics:
        """The sums so far."""
        did_not_pay = self.was_held_back and not self.had_budget
        return SpeculativeStatistics(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(self.accepted_per_pos),
            num_draft_tokens_per_pos=tuple(self.drafted_per_pos),
            num_rounds=self.num_rounds,
            num_stale_drafts=self.num_stale_drafts,
            num_refused_drafts=self.num_refused_drafts,
            num_fallback_decodes=self.num_fallback_decodes,
            disabled_reason=self.disabled_reason or ("DOES_NOT_PAY" if did_not_pay else ""),
        )
