"""What the session store keeps of a session, and how it is written. Pure: no Redis, no clock.

Four keys share the hash tag `{session_id}`, so that one script may touch them all on a cluster:

    specdec:{id}:record    hash    the fields below
    specdec:{id}:tokens    string  prompt and committed tokens as little-endian int32, or sealed (see sealing.py);
                                   absent where not stored
    specdec:{id}:rounds    string  16 bytes for the last restore and for each round since: where it ended
                                   (little-endian int32) and the first 12 bytes of the prefix digest there; tells
                                   DUPLICATE from CONFLICT, and whether a client's tokens are the session's
    specdec:{id}:replies   list    the last 32 answers by request id, so that a retried call gets the same one

Fields of the record:

    state                   CLAIMED (a lease, no Opened yet) | OPEN | FINISHED | CANCELLED (only the epoch is left)
    epoch, nonce            who owns the session; nonce is hexadecimal
    lease_expires_ms        by the store's own clock; 0 once released
    request                 the normalised GenerationSpec as JSON: seed, rule and max_new_tokens as they are in force;
                            its prompt is left out, and empty when read back, since it stands in the tokens
    prompt_digest           SHA-256 over the prompt's tokens, keyed where the record is sealed: tells whether a Resume
                            brings the session's prompt where no tokens are stored
    model, numerics_fingerprint
    tenant                  whom the session is for; Resume has to name the same one
    sample_index            which of its request's samples the session is
    verifier, drafter       endpoints; drafter is empty where none is attached
    round                   of the last commit within (epoch, nonce)
    prompt_length, committed_length, verifier_cached_length, drafter_cached_length
    prefix_digest           SHA-256 over the committed tokens, prompt included, as little-endian int32; keyed where
                            the record is sealed
    store_tokens            1 | 0
    sealed_by               the key under which request, tokens and digests are; absent where they are plain
    tokens_bytes            length of specdec:{id}:tokens, to notice that it was evicted
    abandoned_ms            when a reaper found the lease over; absent while there is an owner
    finish_reason           only with FINISHED
    rounds_start, rounds_start_length, rounds_start_index
                            round and committed_length where rounds of (epoch, nonce) begin, and how many entries of
                            specdec:{id}:rounds are older
"""

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from pydantic import TypeAdapter

from specdec.errors import RecordUnreadableError
from specdec.ids import Epoch, Round, SessionId, digest_tokens
from specdec.params import FinishReason, GenerationSpec

_SPEC = TypeAdapter(GenerationSpec)
_BORDER = struct.Struct("<i12s")


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
    abandoned: bool = False
    prompt_digest: bytes = b""
    """Empty in records of servers that did not write it."""
    borders: tuple[tuple[int, bytes], ...] = ()
    """Where rounds ended, ascending, each with the start of the kept digest of everything before it."""
    kept_digest: Callable[[bytes], bytes] = dataclasses.field(default=lambda digest: digest, compare=False, repr=False)
    """What a record keeps of a digest; see RecordCodec."""

    def agrees_with(self, token_ids: Sequence[int]) -> bool:
        """Whether a prefix (prompt included) may be this session's. It may be behind the record, or ahead of it.

        Where the record keeps tokens, those that both have are equal. Else the last end of a round within the prefix
        decides: what a client has beyond it cannot be compared, and is the verifier's to compute again.
        """
        if self.token_ids is not None:
            num_shared = min(len(self.token_ids), len(token_ids))
            return tuple(token_ids[:num_shared]) == self.token_ids[:num_shared]
        within = [border for border in self.borders if border[0] <= len(token_ids)]
        if not within:
            return True
        end, digest = within[-1]
        return self.kept_digest(digest_tokens(token_ids[:end]))[: len(digest)] == digest

    def has_prompt(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether these are the session's prompt, as far as the record can tell."""
        if len(prompt_token_ids) != self.prompt_length:
            return False
        return self.prompt_digest in (b"", self.kept_digest(digest_tokens(prompt_token_ids)))


class RecordCodec(Protocol):
    """How the parts of one session's record that tell its text are written: plain, or sealed (see sealing.py)."""

    @property
    def sealed_by(self) -> str:
        """The key's name, empty where nothing is sealed."""

    def seal_request(self, request: bytes) -> bytes: ...

    def open_request(self, data: bytes) -> bytes: ...

    def seal_tokens(self, start_position: int, token_ids: Sequence[int]) -> bytes:
        """What stands at [start_position, start_position + n). Parts in order, joined, are what `open_tokens` takes."""

    def open_tokens(self, data: bytes) -> tuple[int, ...]:
        """Raises RecordUnreadableError."""

    def kept_digest(self, digest: bytes) -> bytes:
        """In a sealed record digests are keyed: a plain one tells each next token to whoever tries all of them."""


class PlainCodec:
    """Everything as it is."""

    sealed_by = ""

    def seal_request(self, request: bytes) -> bytes:
        return request

    def open_request(self, data: bytes) -> bytes:
        return data

    def seal_tokens(self, start_position: int, token_ids: Sequence[int]) -> bytes:
        return encode_tokens(token_ids)

    def open_tokens(self, data: bytes) -> tuple[int, ...]:
        return decode_tokens(data)

    def kept_digest(self, digest: bytes) -> bytes:
        return digest


PLAIN = PlainCodec()


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


def checkpoint_fields(checkpoint: Checkpoint, codec: RecordCodec) -> dict[str, str | bytes]:
    """The fields that the scripts only carry. Those that they reckon with are arguments of their own."""
    fields: dict[str, str | bytes] = {
        "request": codec.seal_request(encode_request(checkpoint.request)),
        "model": checkpoint.model,
        "numerics_fingerprint": checkpoint.numerics_fingerprint,
        "tenant": checkpoint.tenant,
        "sample_index": str(checkpoint.sample_index),
        "verifier": checkpoint.verifier,
        "drafter": checkpoint.drafter,
        "prompt_length": str(checkpoint.prompt_length),
        "prompt_digest": codec.kept_digest(digest_tokens(checkpoint.token_ids[: checkpoint.prompt_length])),
        "verifier_cached_length": str(checkpoint.verifier_cached_length),
        "drafter_cached_length": str(checkpoint.drafter_cached_length),
    }
    return fields | ({"sealed_by": codec.sealed_by} if codec.sealed_by else {})


def decode_record(
    fields: Mapping[bytes, bytes],
    tokens: bytes,
    rounds: bytes = b"",
    codec_of: Callable[[str], RecordCodec] = lambda sealed_by: PLAIN,
) -> SessionRecord:
    """The inverse of what the scripts write; raises RecordUnreadableError for what they never write.

    `codec_of` gives the codec for a record by its `sealed_by`, and raises RecordUnreadableError without that key.
    """
    try:
        record = _decode_record(fields, tokens, rounds, codec_of)
    except ValueError as error:
        raise RecordUnreadableError("the session's record cannot be read") from error
    if record.token_ids is not None and (
        len(record.token_ids) != record.committed_length
        or record.kept_digest(digest_tokens(record.token_ids)) != record.prefix_digest
    ):
        raise RecordUnreadableError("the tokens of the session's record are not those that were written")
    return record


def _decode_record(
    fields: Mapping[bytes, bytes], tokens: bytes, rounds: bytes, codec_of: Callable[[str], RecordCodec]
) -> SessionRecord:
    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode()

    def number(name: str) -> int:
        return int(fields.get(name.encode(), b"0"))

    codec = codec_of(text("sealed_by"))
    request = fields.get(b"request")
    finish_reason = text("finish_reason")
    return SessionRecord(
        state=RecordState(text("state")),
        epoch=Epoch(number("epoch")),
        owner_nonce=bytes.fromhex(text("nonce")),
        round=Round(number("round")),
        request=decode_request(codec.open_request(request)) if request is not None else None,
        model=text("model"),
        numerics_fingerprint=text("numerics_fingerprint"),
        verifier=text("verifier"),
        drafter=text("drafter"),
        prompt_length=number("prompt_length"),
        committed_length=number("committed_length"),
        verifier_cached_length=number("verifier_cached_length"),
        drafter_cached_length=number("drafter_cached_length"),
        prefix_digest=fields.get(b"prefix_digest", b""),
        token_ids=codec.open_tokens(tokens) if number("store_tokens") else None,
        finish_reason=FinishReason(finish_reason) if finish_reason else None,
        tenant=text("tenant"),
        sample_index=number("sample_index"),
        abandoned=b"abandoned_ms" in fields,
        prompt_digest=fields.get(b"prompt_digest", b""),
        borders=tuple(_BORDER.iter_unpack(rounds[: len(rounds) // _BORDER.size * _BORDER.size])),
        kept_digest=codec.kept_digest,
    )
