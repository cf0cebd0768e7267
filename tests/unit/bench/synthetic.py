"""Made-up generations with figures that are easy to work out by hand."""

from collections.abc import Sequence

from specdec.bench.plan import BenchPrompt, Lane
from specdec.bench.records import Generation, PeerGeneration, PromptRecord, Recording
from specdec.messages import RoundStatistics, SpeculativeStatistics
from specdec.params import NextTokenKind

NGRAM = Lane("ngram")
DRAFT = Lane("draft_model", "small", "int8")


def plain(token_ids: Sequence[int], elapsed_s: float = 10.0) -> Generation:
    """Target-only: a token a round."""
    rounds = tuple(
        RoundStatistics(0, 0, NextTokenKind.PLAIN, total_time_s=0.1, verify_forward_time_s=0.09, queue_time_s=0.0)
        for _ in token_ids
    )
    return Generation(
        token_ids=tuple(token_ids),
        num_prompt_tokens=7,
        num_first_tokens=1,
        first_tokens_s=1.0,
        last_tokens_s=elapsed_s,
        elapsed_s=elapsed_s,
        rounds=rounds,
        statistics=SpeculativeStatistics(num_rounds=len(rounds)),
    )


def speculative(token_ids: Sequence[int], rounds: Sequence[RoundStatistics], elapsed_s: float = 5.0) -> Generation:
    """Sums are made of the rounds, chains all."""
    drafts = [one for one in rounds if one.num_draft_tokens]
    longest = max((one.num_draft_tokens for one in drafts), default=0)
    return Generation(
        token_ids=tuple(token_ids),
        num_prompt_tokens=7,
        num_first_tokens=1,
        first_tokens_s=1.0,
        last_tokens_s=elapsed_s,
        elapsed_s=elapsed_s,
        rounds=tuple(rounds),
        statistics=SpeculativeStatistics(
            num_drafts=len(drafts),
            num_draft_tokens=sum(one.num_draft_tokens for one in drafts),
            num_accepted_tokens=sum(one.num_accepted_tokens for one in drafts),
            num_accepted_tokens_per_pos=tuple(
                sum(one.num_accepted_tokens > place for one in drafts) for place in range(longest)
            ),
            num_draft_tokens_per_pos=tuple(
                sum(one.num_draft_tokens > place for one in drafts) for place in range(longest)
            ),
            num_rounds=len(rounds),
        ),
    )


def verify_round(
    num_draft_tokens: int,
    num_accepted_tokens: int,
    *,
    total_ms: float = 20.0,
    forward_ms: float = 10.0,
    draft_ms: float = 6.0,
    round_trip_ms: float = 1.0,
    ended: bool = False,
) -> RoundStatistics:
    full = num_accepted_tokens == num_draft_tokens
    return RoundStatistics(
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        next_token_kind=None if ended else NextTokenKind.BONUS if full else NextTokenKind.RECOVERED,
        total_time_s=total_ms / 1000,
        verify_forward_time_s=forward_ms / 1000,
        queue_time_s=0.0,
        draft_time_s=draft_ms / 1000,
        round_trip_time_s=round_trip_ms / 1000,
    )


def prompt_record(
    name: str,
    category: str,
    target_only: Generation | None,
    by_lane: dict[str, Generation],
    peers: dict[str, PeerGeneration] | None = None,
) -> PromptRecord:
    return PromptRecord(BenchPrompt(name, category, "a question"), target_only, by_lane, peers or {})


def recording(*prompts: PromptRecord, lanes: Sequence[Lane] = (NGRAM,), peer_modes: Sequence[str] = ()) -> Recording:
    return Recording("abc", {"cpu": "one"}, {"target": "big"}, lanes, peer_modes, list(prompts), complete=True)
