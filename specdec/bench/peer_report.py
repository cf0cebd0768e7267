"""How our target-only output compares with another program's greedy one, and who took CPU time out of turn. Pure."""

from collections.abc import Sequence
from typing import Any

from specdec.bench import figures
from specdec.bench.peers import GREEDY
from specdec.bench.records import Generation, PeerGeneration, PromptRecord, Recording

Compared = tuple[PromptRecord, Generation, PeerGeneration]
"""A prompt, our target-only output and theirs."""


def build_peer_report(recording: Recording) -> dict[str, Any]:
    """`mismatches_with_own_greedy` counts prompts where a peer's faster mode and its greedy one differ."""
    compared = [
        (record, record.target_only, record.peers[GREEDY])
        for record in recording.prompts
        if record.target_only is not None and GREEDY in record.peers
    ]
    disagreements = [_disagreement(one) for one in compared if one[1].token_ids != one[2].token_ids]
    return {
        "prompts": len(compared),
        "agreeing_prompts": len(compared) - len(disagreements),
        "differently_tokenised_prompts": sum(
            ours.num_prompt_tokens != theirs.num_prompt_tokens for _, ours, theirs in compared
        ),
        "disagreements": disagreements,
        "mismatches_with_own_greedy": {
            mode: _mismatches(compared, mode) for mode in recording.peer_modes if mode != GREEDY
        },
        "idle_cpu_share": {
            "servers_while_peers_generate": figures.median(recording.idle.servers_during_peers),
            "peers_while_servers_generate": figures.median(recording.idle.peers_during_servers),
        },
    }


def _disagreement(compared: Compared) -> dict[str, Any]:
    """`gap` is how much the likeliest token's logit is above the next one's, by the peer, where the outputs part."""
    record, ours, theirs = compared
    index = figures.first_difference(ours.token_ids, theirs.token_ids)
    disagreement: dict[str, Any] = {
        "id": record.prompt.prompt_id,
        "category": record.prompt.category,
        "first_difference": index,
        "our_token_id": _at(ours.token_ids, index),
        "their_token_id": _at(theirs.token_ids, index),
        "gap": None,
    }
    if (top_two := record.top_two) is not None:
        disagreement["top_token_ids"] = list(top_two.token_ids)
        disagreement["gap"] = top_two.logits[0] - top_two.logits[1]
    return disagreement


def _at(token_ids: Sequence[int], index: int | None) -> int | None:
    """None where this output ended before."""
    return token_ids[index] if index is not None and index < len(token_ids) else None


def _mismatches(compared: Sequence[Compared], mode: str) -> int:
    return sum(
        mode in record.peers and record.peers[mode].token_ids != theirs.token_ids for record, _, theirs in compared
    )
