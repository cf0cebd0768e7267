"""What can be read off the length of a message: with padding, only which multiple it is below."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.v1 import common_pb2, generation_pb2, verifier_pb2
from specdec.wire.padding import pad


def delta(num_tokens: int) -> generation_pb2.GenerateResponse:
    """A frame to a client after a round that committed so many tokens."""
    frame = generation_pb2.Delta(text="word " * num_tokens, token_ids=range(100, 100 + num_tokens), position=1000)
    frame.round.num_draft_tokens = 8
    frame.round.num_accepted_tokens = num_tokens - 1
    return generation_pb2.GenerateResponse(event=generation_pb2.GenerationEvent(delta=frame))


def commit(num_tokens: int) -> verifier_pb2.OpenSessionResponse:
    tokens = range(100, 100 + num_tokens)
    event = verifier_pb2.SessionEvent(commit=verifier_pb2.Commit(round=7, token_ids=tokens, text="word " * num_tokens))
    return verifier_pb2.OpenSessionResponse(event=event)


def verdict(num_tokens: int) -> verifier_pb2.VerifyResponse:
    tokens = range(100, 100 + num_tokens)
    told = verifier_pb2.Verdict(draft_sequence=7, num_accepted_tokens=num_tokens - 1, committed_token_ids=tokens)
    return verifier_pb2.VerifyResponse(attachment_id=1, session_id="s" * 20, verdict=told)


def draft(num_tokens: int) -> verifier_pb2.VerifyRequest:
    guess = verifier_pb2.Draft(epoch=1, draft_sequence=7, draft_token_ids=range(100, 100 + num_tokens))
    return verifier_pb2.VerifyRequest(attachment_id=1, session_id="s" * 20, draft=guess)


@pytest.mark.parametrize("message_of", [delta, commit, verdict, draft])
def test_rounds_of_1_to_9_tokens_are_equally_long_on_the_wire(message_of) -> None:
    plain = {len(message_of(n).SerializeToString()) for n in range(1, 10)}
    padded = {len(pad(message_of(n), 256).SerializeToString()) for n in range(1, 10)}
    assert len(plain) == 9
    assert padded == {256}


@given(size=st.integers(0, 40_000), bucket=st.integers(1, 1 << 16))
def test_every_length_is_a_multiple_and_the_next_that_padding_reaches(size: int, bucket: int) -> None:
    message = verifier_pb2.VerifyRequest(session_id="x" * size)
    plain = message.ByteSize()
    serialized = pad(message, bucket).SerializeToString()
    assert len(serialized) % bucket == 0
    out_of_reach = 2 + 4  # 1 and 2 bytes, and one more wherever the length of the padding takes another byte itself
    assert plain <= len(serialized) < plain + bucket + out_of_reach * bucket
    if bucket > 3:
        assert len(serialized) < plain + 2 * bucket + 3


@given(bucket=st.integers(1, 4096))
def test_padding_changes_nothing_else_and_padding_twice_changes_nothing(bucket: int) -> None:
    once = pad(draft(5), bucket)
    twice = pad(verifier_pb2.VerifyRequest.FromString(once.SerializeToString()), bucket)
    assert twice == once
    once.ClearField("padding")
    assert once == draft(5)


def test_without_the_option_nothing_is_added() -> None:
    assert pad(delta(3), 0) == delta(3)


def test_no_other_kind_of_frame_stands_out_but_by_its_multiple() -> None:
    finished = generation_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH)
    last = generation_pb2.GenerateResponse(event=generation_pb2.GenerationEvent(finished=finished))
    assert len(pad(last, 256).SerializeToString()) == len(pad(delta(4), 256).SerializeToString())
