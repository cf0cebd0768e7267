"""Every kind of wrong draft, over the wire to a real verifier: answered by its reason, and the output goes on."""

import pytest
import pytest_asyncio

from specdec.v1 import common_pb2, verifier_pb2
from tests.system.hand_drafter import HandDrafter, HandSession, verifier_stub

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 200
"""Enough that a session is still running when a draft arrives."""
pb = verifier_pb2


def greedy_spec(**speculation: object) -> common_pb2.GenerationSpec:
    return common_pb2.GenerationSpec(
        text="abc abc abc",
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stop=common_pb2.StopCriteria(max_new_tokens=NUM_TOKENS, ignore_end_of_sequence=True),
        speculation=common_pb2.SpeculationOptions(**speculation),
    )


def rejection_spec() -> common_pb2.GenerationSpec:
    spec = greedy_spec()
    spec.sampling.CopyFrom(
        common_pb2.SamplingParameters(temperature=1.0, seed=3, acceptance_rule=common_pb2.ACCEPTANCE_RULE_REJECTION)
    )
    return spec


@pytest_asyncio.fixture(loop_scope="module")
async def verifier(tiny_cluster):
    channel, stub = verifier_stub(tiny_cluster.endpoints["verifier"])
    async with channel:
        yield stub


async def target_only(stub) -> list[int]:
    session = HandSession(stub, greedy_spec(disabled=True))
    await session.open()
    return await session.read_to_end()


async def attached(stub, spec=None, **attach):
    """A running session and its drafter, with the verifier's answer to the attach."""
    session = HandSession(stub, spec or greedy_spec())
    await session.open()
    drafter = HandDrafter(stub)
    drafter.attach(session, **attach)
    return session, drafter, await drafter.answer("attached", "attach_refused")


NORMAL = pb.SparseDistribution(token_ids=[1, 2], probs=[0.5, 0.5])
FAR = 10_000


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"draft_token_ids": [99_999]}, "refused", pb.REFUSAL_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"draft_token_ids": [-5]}, "refused", pb.REFUSAL_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"draft_token_ids": [1] * 600}, "refused", pb.REFUSAL_REASON_TOO_MANY_NODES),
        ({"parent_indices": [3]}, "refused", pb.REFUSAL_REASON_MALFORMED_TREE),
        ({"draft_probs": [NORMAL]}, "refused", pb.REFUSAL_REASON_NOT_ALLOWED_BY_RULE),
        ({"start_position": -3}, "refused", pb.REFUSAL_REASON_MALFORMED_DRAFT),
        ({"draft_sequence": -1}, "refused", pb.REFUSAL_REASON_MALFORMED_DRAFT),
        ({"epoch": 77}, "dropped", pb.DROP_REASON_STALE_EPOCH),
        ({"start_position": FAR}, "dropped", pb.DROP_REASON_TOO_EARLY),
        ({"start_position": 0, "draft_token_ids": [3, 3]}, "dropped", pb.DROP_REASON_HEAD_DIFFERS),
    ],
)
async def test_a_wrong_draft_is_answered_by_its_reason_and_the_output_goes_on(verifier, changes, kind, reason):
    expected = await target_only(verifier)
    session, drafter, answer = await attached(verifier)
    start = answer.start_position + len(answer.committed_token_ids)
    sequence = drafter.draft(session, [1], start, **changes)
    response = await drafter.answer(kind)
    assert response.draft_sequence == changes.get("draft_sequence", sequence)
    assert response.reason == reason
    assert await session.read_to_end() == expected
    drafter.end()


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [
        (pb.SparseDistribution(token_ids=[1, 2], probs=[0.5, 0.1]), pb.REFUSAL_REASON_UNNORMALISED),
        (pb.SparseDistribution(token_ids=[1, 2], probs=[float("nan"), 0.5]), pb.REFUSAL_REASON_INVALID_PROBABILITY),
        (pb.SparseDistribution(token_ids=[1, 2], probs=[float("inf"), 0.5]), pb.REFUSAL_REASON_INVALID_PROBABILITY),
        (pb.SparseDistribution(token_ids=[1, 2], probs=[2.0, -1.0]), pb.REFUSAL_REASON_INVALID_PROBABILITY),
        (pb.SparseDistribution(token_ids=[2], probs=[1.0]), pb.REFUSAL_REASON_MISSING_PROBABILITY),
    ],
)
async def test_bad_probabilities_are_refused_and_the_output_goes_on(verifier, distribution, reason):
    session, drafter, answer = await attached(verifier, rejection_spec())
    start = answer.start_position + len(answer.committed_token_ids)
    drafter.draft(session, [1], start, draft_probs=[distribution])
    assert (await drafter.answer("refused")).reason == reason
    assert len(await session.read_to_end()) == NUM_TOKENS
    drafter.end()


async def test_a_duplicate_round_is_dropped(verifier):
    expected = await target_only(verifier)
    session, drafter, answer = await attached(verifier)
    start = answer.start_position + len(answer.committed_token_ids)
    sequence = drafter.draft(session, expected[:2], start)
    drafter.draft(session, expected[:2], start, draft_sequence=sequence)
    answers = [await drafter.answer("verdict", "dropped") for _ in range(2)]
    assert {answer.draft_sequence for answer in answers} == {sequence}
    assert pb.DROP_REASON_DUPLICATE in [getattr(answer, "reason", None) for answer in answers]
    assert await session.read_to_end() == expected
    drafter.end()


async def test_a_draft_on_an_attachment_that_never_was_is_refused_and_the_stream_lives_on(verifier):
    expected = await target_only(verifier)
    session, drafter, _ = await attached(verifier)
    drafter.draft(session, [1], 0, attachment_id=55)
    assert (await drafter.answer("refused")).reason == pb.REFUSAL_REASON_UNKNOWN_ATTACHMENT
    assert await session.read_to_end() == expected
    drafter.end()


async def test_a_message_without_content_and_one_without_an_address_hurt_nobody(verifier):
    expected = await target_only(verifier)
    session, drafter, answer = await attached(verifier)
    drafter.send(session)
    nameless = HandSession.__new__(HandSession)
    nameless.session_id, nameless.epoch = "no such / name", 1
    drafter.draft(nameless, [1], 0)
    assert (await drafter.answer("refused")).reason == pb.REFUSAL_REASON_UNKNOWN_ATTACHMENT
    start = answer.start_position + len(answer.committed_token_ids)
    sequence = drafter.draft(session, expected[:2], start)
    assert (await drafter.answer("verdict", "dropped")).draft_sequence == sequence
    assert await session.read_to_end() == expected
    drafter.end()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_fingerprint": "0" * 64}, pb.ATTACH_REFUSAL_TOKENIZER_MISMATCH),
        ({"vocabulary_size": 100}, pb.ATTACH_REFUSAL_VOCABULARY_MISMATCH),
        ({"epoch": 9}, pb.ATTACH_REFUSAL_STALE_EPOCH),
        ({"attach_key": b"x" * 32}, pb.ATTACH_REFUSAL_BAD_KEY),
        ({"protocol_version": 99}, pb.ATTACH_REFUSAL_PROTOCOL_VERSION),
        ({"known_length": 10**6}, pb.ATTACH_REFUSAL_BAD_KNOWN_LENGTH),
        ({"context_limit": 2}, pb.ATTACH_REFUSAL_CONTEXT_TOO_SHORT),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_at_attach(verifier, changes, reason):
    session, drafter, answer = await attached(verifier, **changes)
    assert answer.reason == reason
    assert answer.message
    assert len(await session.read_to_end()) == NUM_TOKENS
    drafter.end()


async def test_a_drafter_that_vanishes_costs_speed_alone(verifier):
    expected = await target_only(verifier)
    session, drafter, answer = await attached(verifier)
    start = answer.start_position + len(answer.committed_token_ids)
    drafter.draft(session, expected[:3], start)
    drafter.vanish()
    assert await session.read_to_end() == expected
    assert any(change.state == pb.ATTACHMENT_STATE_DETACHED for change in session.changes)


async def test_sessions_on_one_stream_are_not_disturbed_by_a_hostile_one(verifier):
    expected = await target_only(verifier)
    victim, drafter, answer = await attached(verifier)
    hostile = HandSession(verifier, greedy_spec())
    await hostile.open()
    drafter.attach(hostile)
    await drafter.answer("attached")
    for _ in range(30):
        drafter.draft(hostile, [10**6], 0)
    start = answer.start_position + len(answer.committed_token_ids)
    drafter.draft(victim, expected[:4], start)
    assert await victim.read_to_end() == expected
    assert await hostile.read_to_end() == expected
    drafter.end()


async def test_a_draft_time_beyond_what_the_wire_can_say_hurts_nobody(verifier):
    expected = await target_only(verifier)
    session, drafter, answer = await attached(verifier)
    start = answer.start_position + len(answer.committed_token_ids)
    drafter.draft(session, [], start, draft_time={"seconds": 315_576_000_000, "nanos": 999_999_999})
    assert await session.read_to_end() == expected
    drafter.end()


async def test_drafts_handed_over_before_the_drafter_ends_its_half_are_answered(verifier):
    session, drafter, answer = await attached(verifier)
    start = answer.start_position + len(answer.committed_token_ids)
    sequence = drafter.draft(session, [1, 2], start)
    drafter.end()
    assert (await drafter.answer("verdict", "dropped")).draft_sequence == sequence
    session.leave()
