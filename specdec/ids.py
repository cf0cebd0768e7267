"""Distinct ids are distinct types, so that an epoch never passes for a round."""

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

SessionId = NewType("SessionId", str)
Epoch = NewType("Epoch", int)
Round = NewType("Round", int)
TokenId = NewType("TokenId", int)
AttachmentId = NewType("AttachmentId", int)
DraftSequence = NewType("DraftSequence", int)


def digest_tokens(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids as little-endian int32: how two sides compare prefixes without sending them."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).digest()


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    limit = min(len(left), len(right))
    if list(left[:limit]) == list(right[:limit]):  # the usual case, compared in C
        return limit
    return next(i for i in range(limit) if left[i] != right[i])
