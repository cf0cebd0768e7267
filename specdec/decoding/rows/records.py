"""The records that tell a kernel its work: what rounds, nodes of drafts, depths and a batch are to compiled code.

Arrays travel as addresses. Offsets are counted in items.

Shapes: R rows, N vocabulary_size, B blocks of a row; T threads.
"""

import numpy as np

GREEDY, COUPLED, RESIDUAL = 0, 1, 2
"""How rows are decided: `one_hot` and `rejection` are one rule with different distributions."""

NOTHING = -1
"""The next token where no token is possible: the logits are not finite."""

ROUND = np.dtype(
    [
        ("rule", np.int64),
        ("first_row", np.int64),
        ("first_node", np.int64),
        ("num_nodes", np.int64),
        ("first_depth", np.int64),
        ("num_early", np.int64),  # depths at which the output has fewer than min_tokens
        ("temperature", np.float32),  # 0 under GREEDY alone
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float64),
        ("min_p", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),  # below N; 0 is off
        ("first_listed", np.int64),  # the lists stand one after the other
        ("num_allowed", np.int64),
        ("num_banned", np.int64),
        ("num_suppressed", np.int64),
        ("num_biased", np.int64),
        ("penalises", np.int64),
        ("num_seen", np.int64),  # 0 where nothing is penalised
        ("seen_ids", np.uintp),  # [num_seen] int32
        ("seen_counts", np.uintp),  # [num_seen] int32: how often the output holds each
        ("num_accepted", np.int64),  # out
        ("next_token_id", np.int64),  # out
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("token_id", np.int32),
        ("parent", np.int32),  # a node of the same round, or -1
        ("count", np.int32),  # how often the output before the round holds the token
        ("accepted", np.int32),  # out: at place i of a round's nodes, the node that was accepted at depth i
        ("number", np.float64),  # the uniform number that decides whether it is accepted
        ("first_drafted", np.int64),  # the distribution that it was drawn from
        ("num_drafted", np.int64),
    ],
    align=True,
)

DEPTH = np.dtype([("gumbel_key", np.uint64), ("target_number", np.float64), ("residual_number", np.float64)])

BATCH = np.dtype(
    [
        ("vocabulary_size", np.int64),
        ("num_rounds", np.int64),
        ("rounds", np.uintp),
        ("num_rows", np.int64),
        ("logits", np.uintp),  # [R, row_stride] float32
        ("row_stride", np.int64),
        ("scores", np.uintp),  # [R, N] float32: out, where scores are wanted
        ("num_nodes", np.int64),
        ("nodes", np.uintp),
        ("num_depths", np.int64),
        ("depths", np.uintp),
        ("num_listed", np.int64),
        ("listed_ids", np.uintp),  # int32
        ("listed_biases", np.uintp),  # float32
        ("num_drafted", np.int64),
        ("drafted_ids", np.uintp),  # int32
        ("drafted_probs", np.uintp),  # float64, each distribution's sum is 1
        ("num_threads", np.int64),
        ("floats", np.uintp),  # [T, 3, B * BLOCK] float32: scores; weights; logits that were edited
        ("maxima", np.uintp),  # [T, B] float32
        ("sums", np.uintp),  # [T, B] float64
        ("candidates", np.uintp),  # [T, B * BLOCK] int32
        ("buckets", np.uintp),  # [T, DIGIT_BUCKETS] float64
        ("paths", np.uintp),  # [T, 2, num_nodes] int32: tokens accepted, and their counts
        ("path_scores", np.uintp),  # [T, num_nodes] float32: of those tokens, before they are penalised
    ],
    align=True,
)
