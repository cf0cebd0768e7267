"""Tokens of sessions whose owner's stream broke, kept for a while so that the next owner finds what no record had yet.

Knows tokens, epochs and whose they are; refuses to know caches, streams and clocks: the time is passed in. Where there
is more than fits, the oldest go first. Nothing is kept for longer than the grace time.
"""

import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from specdec.ids import Epoch, SessionId, digest_tokens
from specdec.params import SamplingParams

MAX_KEPT_OUTPUTS = 4096
MAX_KEPT_BYTES = 64 << 20
BYTES_PER_OUTPUT = 1024
"""What is kept beside the tokens, about."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Output tokens beyond an owner's committed ones, and the epoch that decided them. No tokens: epoch 0."""

    token_ids: Sequence[int] = ()
    epoch: Epoch = Epoch(0)


@dataclasses.dataclass(frozen=True)
class OutputIdentity:
    """What two outputs must share for one to go on from the other: a tenant, a prompt and what decides its tokens.

    `sampling` has the rule spelled out: an owner may name the one that an earlier owner left to us.
    """

    tenant: str
    prompt_digest: bytes
    sampling: SamplingParams
    sample_index: int


def output_identity(
    tenant: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, sample_index: int
) -> OutputIdentity:
    """The identity of an output. The prompt itself is not kept with it."""
    law = dataclasses.replace(sampling, acceptance_rule=sampling.rule)
    return OutputIdentity(tenant, digest_tokens(prompt_token_ids), law, sample_index)


@dataclasses.dataclass(frozen=True)
class _Kept:
    identity: OutputIdentity
    epoch: Epoch
    output_token_ids: "array[int]"
    expires_at: float

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_OUTPUT + self.output_token_ids.itemsize * len(self.output_token_ids)


class KeptTokens:
    """The outputs that are kept, one for each session. With a grace of 0 nothing is."""

    def __init__(self, grace_s: float, *, max_outputs: int = MAX_KEPT_OUTPUTS, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._grace_s = grace_s
        self._max_outputs = max_outputs
        self._max_bytes = max_bytes
        self._kept: OrderedDict[SessionId, _Kept] = OrderedDict()  # in the order in which they expire
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        session_id: SessionId,
        identity: OutputIdentity,
        epoch: Epoch,
        output_token_ids: Sequence[int],
        now: float,
    ) -> None:
        """Keeps what an epoch decided, in place of what an earlier one did."""
        self.discard(session_id)
        if self._grace_s <= 0 or not output_token_ids:
            return
        kept = _Kept(identity, epoch, array("i", output_token_ids), now + self._grace_s)
        self._kept[session_id] = kept
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._max_outputs or self.num_bytes > self._max_bytes:
            self.discard(next(iter(self._kept)))

    def find(
        self, session_id: SessionId, identity: OutputIdentity, output_token_ids: Sequence[int], now: float
    ) -> Continuation:
        """What is kept beyond an output; nothing where it differs from what is kept, or belongs to something else."""
        kept = self._kept.get(session_id)
        if kept is None or kept.expires_at <= now or kept.identity != identity:
            return Continuation()
        known, beyond = kept.output_token_ids[: len(output_token_ids)], kept.output_token_ids[len(output_token_ids) :]
        if not beyond or known.tolist() != list(output_token_ids):
            return Continuation()
        return Continuation(beyond.tolist(), kept.epoch)

    def discard(self, session_id: SessionId) -> None:
        """Forgets what is kept of a session."""
        kept = self._kept.pop(session_id, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes

    def expire(self, now: float) -> None:
        """Forgets what was kept for its time."""
        while self._kept and next(iter(self._kept.values())).expires_at <= now:
            self.discard(next(iter(self._kept)))


def chosen(recorded: Continuation, kept: Continuation) -> Continuation:
    """Which of two continuations is gone on from: that of the higher epoch, then the longer."""
    return max(recorded, kept, key=lambda one: (one.epoch, len(one.token_ids)))
