"""What the session store keeps of a session, and how it is written. Pure: no Redis, no clock.

Four keys share the hash tag `{session_id}`, so that one script may touch them all on a cluster:

    specdec:{id}:record    hash    the fields below
    specdec:{id}:tokens    string  prompt and committed tokens as little-endian int32; absent where not stored
    specdec:{id}:rounds    string  16 bytes a round since the last acquire or restore: where the round ended
                                   (little-endian int32) and the first 12 bytes of the prefix digest there; tells
                                   DUPLICATE from CONFLICT
    specdec:{id}:replies   list    the last 32 answers by request id, so that a retried call gets the same one

Fields of the record:

    state                   CLAIMED (a lease, no Opened yet) | OPEN | FINISHED | CANCELLED (only the epoch is left)
    epoch, nonce            who owns the session; nonce is hexadecimal
    lease_expires_ms        by the store's own clock; 0 once released
    request                 the normalised GenerationSpec as JSON: seed, rule and max_new_tokens as they are in force;
                            its prompt is left out, and empty when read back, since it stands in the tokens
    model, numerics_fingerprint
    tenant                  whom the session is for; Resume has to name the same one
    sample_index            which of its request's samples the session is
    verifier, drafter       endpoints; drafter is empty where none is attached
    round                   of the last commit within (epoch, nonce)
    prompt_length, committed_length, verifier_cached_length, drafter_cached_length
    prefix_digest           SHA-256 over the committed tokens, prompt included, as little-endian int32
    store_tokens            1 | 0
    finish_reason           only with FINISHED
    rounds_start, rounds_start_length   round and committed_length where specdec:{id}:rounds begins
"""

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from enum import Enum

from pydantic import TypeAdapter

from specdec.errors import RecordUnreadableError
from specdec.ids import Epoch, Round, SessionId
from specdec.params import FinishReason, GenerationSpec

_SPEC = TypeAdapter(GenerationSpec)


class RecordState(Enum):
    CLAIMED = "CLAIMED"
    OPEN = "OPEN"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything that a session's owner knows and another would need to go on. `token_ids` is prompt and output."""

    session_id: SessionId
    epoch: Epoch
    owner_nonce: bytes
    round: Round
    request: GenerationSpec
    model: str
    numerics_fingerprint: str
    verifier: str
    drafter: str
    prompt_length: int
    verifier_cached_length: int
    drafter_cached_length: int
    prefix_digest: bytes
    token_ids: Sequence[int]
    tenant: str
    sample_index: int


@dataclasses.dataclass(frozen=True)
class CommittedRound:
    """One round as the store takes it. Its n tokens stand at [base_position, base_position + n)."""

    round: Round
    base_position: int
    token_ids: Sequence[int]
    prefix_digest: bytes
    verifier_cached_length: int
    drafter_cached_length: int
    drafter: str


@dataclasses.dataclass(frozen=True)
class SessionRecord:
    """A record as it was read. No `request` while the session is only claimed; no `token_ids` where not stored."""

    state: RecordState
    epoch: Epoch
    owner_nonce: bytes
    round: Round
    request: GenerationSpec | None
    model: str
    numerics_fingerprint: str
    verifier: str
    drafter: str
    prompt_length: int
    committed_length: int
    verifier_cached_length: int
    drafter_cached_length: int
    prefix_digest: bytes
    token_ids: tuple[int, ...] | None
    finish_reason: FinishReason | None
    tenant: str
    sample_index: int


def record_keys(session_id: SessionId) -> list[str]:
    """In the order in which the scripts take them."""
    return [f"specdec:{{{session_id}}}:{name}" for name in ("record", "tokens", "rounds", "replies")]


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def decode_tokens(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data[: len(data) // 4 * 4])


def encode_request(request: GenerationSpec) -> bytes:
    sampling = dataclasses.replace(request.sampling, logit_bias=dict(request.sampling.logit_bias))
    return _SPEC.dump_json(dataclasses.replace(request, prompt="", sampling=sampling))


def decode_request(data: bytes) -> GenerationSpec:
    return _SPEC.validate_json(data)


def checkpoint_fields(checkpoint: Checkpoint) -> dict[str, str | bytes]:
    """The fields that the scripts only carry. Those that they reckon with are arguments of their own."""
    return {
        "request": encode_request(checkpoint.request),
        "model": checkpoint.model,
        "numerics_fingerprint": checkpoint.numerics_fingerprint,
        "tenant": checkpoint.tenant,
        "sample_index": str(checkpoint.sample_index),
        "verifier": checkpoint.verifier,
        "drafter": checkpoint.drafter,
        "prompt_length": str(checkpoint.prompt_length),
        "verifier_cached_length": str(checkpoint.verifier_cached_length),
        "drafter_cached_length": str(checkpoint.drafter_cached_length),
        "prefix_digest": checkpoint.prefix_digest,
    }


def decode_record(fields: Mapping[bytes, bytes], tokens: bytes) -> SessionRecord:
    """The inverse of what the scripts write; raises RecordUnreadableError for what they never write."""
    try:
        return _decode_record(fields, tokens)
    except ValueError as error:
        raise RecordUnreadableError("the session's record cannot be read") from error


def _decode_record(fields: Mapping[bytes, bytes], tokens: bytes) -> SessionRecord:
    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode()

    def number(name: str) -> int:
        return int(fields.get(name.encode(), b"0"))

    request = fields.get(b"request")
    finish_reason = text("finish_reason")
    return SessionRecord(
        state=RecordState(text("state")),
        epoch=Epoch(number("epoch")),
        owner_nonce=bytes.fromhex(text("nonce")),
        round=Round(number("round")),
        request=decode_request(request) if request is not None else None,
        model=text("model"),
        numerics_fingerprint=text("numerics_fingerprint"),
        verifier=text("verifier"),
        drafter=text("drafter"),
        prompt_length=number("prompt_length"),
        committed_length=number("committed_length"),
        verifier_cached_length=number("verifier_cached_length"),
        drafter_cached_length=number("drafter_cached_length"),
        prefix_digest=fields.get(b"prefix_digest", b""),
        token_ids=decode_tokens(tokens) if number("store_tokens") else None,
        finish_reason=FinishReason(finish_reason) if finish_reason else None,
        tenant=text("tenant"),
        sample_index=number("sample_index"),
    )
