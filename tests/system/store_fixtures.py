"""Builders shared by the tests of the session store and of what writes to it."""

import secrets
from collections.abc import Sequence

from orchestrator.record import Checkpoint, CommittedRound
from orchestrator.session_store import Lease, SessionStore
from specdec.ids import Epoch, Round, SessionId, digest_tokens
from specdec.params import GenerationSpec, SamplingParams

PROMPT = (5, 6, 7)


def new_nonce() -> bytes:
    return secrets.token_bytes(16)


def make_checkpoint(lease: Lease, token_ids: Sequence[int] = PROMPT, *, round_number: int = 0) -> Checkpoint:
    return Checkpoint(
        session_id=lease.session_id,
        epoch=lease.epoch,
        owner_nonce=lease.owner_nonce,
        round=Round(round_number),
        request=GenerationSpec(prompt=PROMPT, sampling=SamplingParams(temperature=0.5, seed=11, logit_bias={3: -1.5})),
        model="target",
        numerics_fingerprint="bits",
        verifier="127.0.0.1:1",
        drafter="",
        prompt_length=len(PROMPT),
        verifier_cached_length=0,
        drafter_cached_length=0,
        prefix_digest=digest_tokens(token_ids),
        token_ids=tuple(token_ids),
        tenant="somebody",
        sample_index=3,
    )


def make_round(number: int, prefix: Sequence[int], token_ids: Sequence[int]) -> CommittedRound:
    """Round `number` adds token_ids after prefix (prompt included)."""
    return CommittedRound(
        round=Round(number),
        base_position=len(prefix),
        token_ids=tuple(token_ids),
        prefix_digest=digest_tokens([*prefix, *token_ids]),
        verifier_cached_length=len(prefix),
        drafter_cached_length=2,
        drafter="127.0.0.1:2",
    )


async def acquired(store: SessionStore, session_id: str = "s", *, nonce: bytes | None = None) -> Lease:
    """A lease, claimed and nothing more."""
    nonce = nonce or new_nonce()
    reply = await store.acquire(SessionId(session_id), nonce)
    return Lease(SessionId(session_id), Epoch(reply.epoch), nonce)


async def opened(store: SessionStore, session_id: str = "s") -> Lease:
    """A lease whose record holds the prompt."""
    lease = await acquired(store, session_id)
    await store.restore(make_checkpoint(lease))
    return lease
