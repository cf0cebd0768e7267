"""What rounds and sessions cost and brought."""

from specdec.messages import RoundStatistics, SpeculativeStatistics, Usage
from specdec.v1 import common_pb2 as pb
from specdec.wire.convert.enums import NEXT_TOKEN_KIND
from specdec.wire.convert.scalars import duration_from_pb, duration_to_pb, optional_duration_to_pb


def round_statistics_to_pb(statistics: RoundStatistics) -> pb.RoundStatistics:
    return pb.RoundStatistics(
        num_draft_tokens=statistics.num_draft_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        next_token_kind=NEXT_TOKEN_KIND.to_pb(statistics.next_token_kind),
        total_time=duration_to_pb(statistics.total_time_s),
        verify_forward_time=duration_to_pb(statistics.verify_forward_time_s),
        queue_time=duration_to_pb(statistics.queue_time_s),
        draft_time=optional_duration_to_pb(statistics.draft_time_s),
        round_trip_time=optional_duration_to_pb(statistics.round_trip_time_s),
        fallback_decode=statistics.fallback_decode,
    )


def round_statistics_from_pb(message: pb.RoundStatistics) -> RoundStatistics:
    return RoundStatistics(
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        next_token_kind=NEXT_TOKEN_KIND.optional_from_pb(message.next_token_kind),
        total_time_s=duration_from_pb(message.total_time, "total_time"),
        verify_forward_time_s=duration_from_pb(message.verify_forward_time, "verify_forward_time"),
        queue_time_s=duration_from_pb(message.queue_time, "queue_time"),
        draft_time_s=duration_from_pb(message.draft_time, "draft_time") if message.HasField("draft_time") else None,
        round_trip_time_s=(
            duration_from_pb(message.round_trip_time, "round_trip_time")
            if message.HasField("round_trip_time")
            else None
        ),
        fallback_decode=message.fallback_decode,
    )


def speculative_statistics_to_pb(statistics: SpeculativeStatistics) -> pb.SpeculativeStatistics:
    return pb.SpeculativeStatistics(
        num_drafts=statistics.num_drafts,
        num_draft_tokens=statistics.num_draft_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_accepted_tokens_per_pos=statistics.num_accepted_tokens_per_pos,
        num_draft_tokens_per_pos=statistics.num_draft_tokens_per_pos,
        num_rounds=statistics.num_rounds,
        num_stale_drafts=statistics.num_stale_drafts,
        num_refused_drafts=statistics.num_refused_drafts,
        num_fallback_decodes=statistics.num_fallback_decodes,
        disabled_reason=statistics.disabled_reason,
    )


def speculative_statistics_from_pb(message: pb.SpeculativeStatistics) -> SpeculativeStatistics:
    return SpeculativeStatistics(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(message.num_accepted_tokens_per_pos),
        num_draft_tokens_per_pos=tuple(message.num_draft_tokens_per_pos),
        num_rounds=message.num_rounds,
        num_stale_drafts=message.num_stale_drafts,
        num_refused_drafts=message.num_refused_drafts,
        num_fallback_decodes=message.num_fallback_decodes,
        disabled_reason=message.disabled_reason,
    )


def usage_to_pb(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_prompt_tokens=usage.num_cached_prompt_tokens,
    )


def usage_from_pb(message: pb.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
    )
