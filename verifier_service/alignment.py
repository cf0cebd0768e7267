"""Line a draft up with what is committed, and check that it is well formed. Pure: no engine, no clock, no torch.

A draft is advice about positions. Between its making and its arrival the verifier may have moved on; then only the part
beyond `committed_length` is of use, and only if its head is what was committed meanwhile.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from specdec.decoding.draft import DraftTokens, check_draft
from specdec.ids import common_prefix_length
from specdec.messages import Draft, DropReason, RefusalReason
from specdec.params import AcceptanceRule


def check_message(draft: Draft, rule: AcceptanceRule, vocabulary_size: int) -> RefusalReason | None:
    """Why a draft breaks the rules of the protocol, or None.

    `vocabulary_size` counts the target's logit rows: padding ids are legal, they have probability 0.
    """
    if draft.start_position < 0 or draft.draft_sequence < 1:
        return RefusalReason.MALFORMED_DRAFT
    return check_draft(draft_tokens(draft), rule, vocabulary_size)


def draft_tokens(draft: Draft) -> DraftTokens:
    """The guesses of a draft without its address."""
    return DraftTokens(
        token_ids=tuple(draft.draft_token_ids),
        parent_indices=tuple(draft.parent_indices) or None,
        draft_probs=tuple(draft.draft_probs) or None,
    )


@dataclasses.dataclass(frozen=True)
class AlignedDraft:
    """A part of a draft; `nodes[i]` is the drafter's own number of the part's node i."""

    tokens: DraftTokens
    nodes: Sequence[int]


def align(draft: Draft, committed_token_ids: Sequence[int]) -> AlignedDraft | DropReason:
    """The part of a draft that lies beyond the committed tokens, or why there is none.

    An empty draft at `committed_length` is of use: it says that there is no guess and nothing to wait for.
    """
    committed_length = len(committed_token_ids)
    if draft.start_position > committed_length:
        return DropReason.TOO_EARLY
    tokens = draft_tokens(draft)
    if draft.start_position == committed_length:
        return AlignedDraft(tokens, range(len(tokens.token_ids)))
    head = committed_token_ids[draft.start_position :]
    return _tail_of_tree(tokens, head) if tokens.parent_indices else _tail_of_chain(tokens, head)


def _tail_of_chain(tokens: DraftTokens, head: Sequence[int]) -> AlignedDraft | DropReason:
    overlap = min(len(head), len(tokens.token_ids))
    if list(head[:overlap]) != list(tokens.token_ids[:overlap]):
        return DropReason.HEAD_DIFFERS
    if len(tokens.token_ids) <= len(head):
        return DropReason.TOO_LATE
    nodes = range(len(head), len(tokens.token_ids))
    return AlignedDraft(_chain_slice(tokens, nodes), nodes)


def _tail_of_tree(tokens: DraftTokens, head: Sequence[int]) -> AlignedDraft | DropReason:
    parents = tokens.parent_indices or ()
    root, depth = _follow(tokens.token_ids, parents, head)
    if depth < len(head):
        return DropReason.HEAD_DIFFERS if root in parents else DropReason.TOO_LATE
    kept = {root: -1}
    for node, parent in enumerate(parents):
        if parent in kept and node != root:
            kept[node] = len(kept) - 1
    nodes = [node for node in kept if node != root]
    if not nodes:
        return DropReason.TOO_LATE
    return AlignedDraft(_subtree(tokens, nodes, kept), nodes)


def num_right_tokens(draft: Draft, committed_token_ids: Sequence[int]) -> int:
    """How many tokens of a draft, from its root on, are committed where it guessed them."""
    decided = committed_token_ids[draft.start_position :]
    if not draft.parent_indices:
        return common_prefix_length(draft.draft_token_ids, decided)
    return _follow(draft.draft_token_ids, draft.parent_indices, decided)[1]


def _follow(token_ids: Sequence[int], parents: Sequence[int], decided: Sequence[int]) -> tuple[int, int]:
    """The deepest node of a tree on the path of the decided tokens, -1 for none, and its depth."""
    node_there, depth = -1, 0
    for node, parent in enumerate(parents):  # parents stand before their children, so one pass goes all the way down
        if depth < len(decided) and parent == node_there and token_ids[node] == decided[depth]:
            node_there, depth = node, depth + 1
    return node_there, depth


def cut(draft: AlignedDraft, *, max_nodes: int, max_depth: int) -> AlignedDraft:
    """The draft within `max_nodes` nodes and `max_depth` tokens from root to leaf, in the order of the draft.

    Parents stand before their children, so what stays is a tree again; siblings stay in the order they were drawn.
    """
    tokens = draft.tokens
    if tokens.parent_indices is None:
        kept = range(max(0, min(max_nodes, max_depth, len(tokens.token_ids))))
        return AlignedDraft(_chain_slice(tokens, kept), draft.nodes[: len(kept)])
    new_index: dict[int, int] = {-1: -1}
    depth: dict[int, int] = {-1: 0}
    for node, parent in enumerate(tokens.parent_indices):
        if parent in new_index and depth[parent] < max_depth and len(new_index) - 1 < max_nodes:
            new_index[node] = len(new_index) - 1
            depth[node] = depth[parent] + 1
    nodes = [node for node in new_index if node >= 0]
    return AlignedDraft(_subtree(tokens, nodes, new_index), [draft.nodes[node] for node in nodes])


def _chain_slice(tokens: DraftTokens, places: range) -> DraftTokens:
    part = slice(places.start, places.stop)
    return DraftTokens(
        token_ids=tokens.token_ids[part], draft_probs=tokens.draft_probs[part] if tokens.draft_probs else None
    )


def _subtree(tokens: DraftTokens, nodes: Sequence[int], new_index: Mapping[int, int]) -> DraftTokens:
    """The named nodes with their parents renumbered."""
    return DraftTokens(
        token_ids=tuple(tokens.token_ids[node] for node in nodes),
        parent_indices=tuple(new_index[tokens.parents[node]] for node in nodes) or None,
        draft_probs=tuple(tokens.draft_probs[node] for node in nodes) if tokens.draft_probs else None,
    )
