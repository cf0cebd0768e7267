"""The small parts of a session's stream: its outbox, its tokens, its record's form, its attach keys."""

import asyncio
import hashlib
import hmac
import subprocess
import sys

import pytest

from orchestrator.outbox import Outbox
from orchestrator.prefix import TokenPrefix
from orchestrator.record import decode_request, decode_tokens, encode_request, encode_tokens, record_keys
from specdec.attach_key import attach_key
from specdec.errors import SlowReaderError, VerifierLostError
from specdec.ids import AttachmentId, SessionId, digest_tokens
from specdec.messages import Delta, RoundStatistics
from specdec.params import (
    AcceptanceRule,
    GenerationSpec,
    SamplingParams,
    SpeculationOptions,
    StopCriteria,
)


def delta(position: int) -> Delta:
    return Delta("", (1,), position, RoundStatistics(0, 0, None, 0.0, 0.0, 0.0))


async def test_frames_that_were_put_are_read_before_the_error_that_ended_the_stream() -> None:
    outbox = Outbox(4)
    outbox.put(delta(0))
    outbox.put(delta(1))
    outbox.close(VerifierLostError("gone"))
    outbox.close()
    frames = outbox.frames()
    assert [await anext(frames), await anext(frames)] == [delta(0), delta(1)]
    with pytest.raises(VerifierLostError):
        await anext(frames)


async def test_a_reader_wakes_for_a_frame_and_for_the_end() -> None:
    outbox = Outbox(4)

    async def read() -> list[object]:
        return [frame async for frame in outbox.frames()]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    outbox.put(delta(0))
    await asyncio.sleep(0)
    outbox.close()
    async with asyncio.timeout(1):
        assert await reading == [delta(0)]


def test_an_outbox_is_bounded() -> None:
    outbox = Outbox(2)
    outbox.put(delta(0))
    outbox.put(delta(1))
    with pytest.raises(SlowReaderError):
        outbox.put(delta(2))


def test_a_growing_prefix_has_the_digest_of_all_its_tokens() -> None:
    prefix = TokenPrefix([1, 2])
    assert prefix.digest() == digest_tokens([1, 2])
    prefix.extend([3])
    prefix.extend([])
    assert (prefix.digest(), prefix.snapshot(), len(prefix)) == (digest_tokens([1, 2, 3]), (1, 2, 3), 3)


def test_a_request_reads_back_from_the_record_without_its_prompt() -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_k=5,
        logit_bias={3: 1.5, 9: -100.0},
        banned_token_ids=(4,),
        seed=2**63 - 1,
        acceptance_rule=AcceptanceRule.ONE_HOT,
    )
    stop = StopCriteria(max_new_tokens=9, stop_strings=("\n\n", "é"), stop_token_ids=(2,))
    spec = GenerationSpec("a secret", "m", sampling, stop, SpeculationOptions(max_draft_wait_s=0.25))
    written = encode_request(spec)
    assert b"secret" not in written
    assert decode_request(written) == GenerationSpec("", "m", sampling, stop, spec.speculation)


def test_tokens_are_little_endian_int32() -> None:
    assert encode_tokens([1, 2**31 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\x7f"
    assert decode_tokens(encode_tokens([1, 2**31 - 1])) == (1, 2**31 - 1)


def test_all_keys_of_a_session_share_one_hash_tag() -> None:
    assert {key[key.index("{") : key.index("}") + 1] for key in record_keys(SessionId("s-1"))} == {"{s-1}"}


def test_an_attach_key_is_bound_to_its_attachment() -> None:
    assert attach_key(b"k", AttachmentId(258)) == hmac.new(b"k", b"\0\0\0\0\0\0\1\2", hashlib.sha256).digest()


def test_the_orchestrator_never_loads_torch() -> None:
    code = "import sys, orchestrator.main, orchestrator.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
