"""Which outputs are kept, for whom, and for how long."""

import pytest

from specdec.ids import Epoch, SessionId
from specdec.params import AcceptanceRule, SamplingParams
from verifier_service.kept_tokens import BYTES_PER_OUTPUT, Continuation, KeptTokens, chosen, output_identity

SAMPLING = SamplingParams(seed=7)
IDENTITY = output_identity("tenant", (5, 6, 7), SAMPLING, 0)
S = SessionId("s")


def kept_tokens(**limits: int) -> KeptTokens:
    kept = KeptTokens(30.0, **limits)
    kept.keep(S, IDENTITY, Epoch(3), [1, 2, 3, 4], now=100.0)
    return kept


def test_what_is_kept_beyond_an_output_is_found_with_the_epoch_that_decided_it():
    assert kept_tokens().find(S, IDENTITY, [1, 2], now=129.0) == Continuation([3, 4], Epoch(3))


@pytest.mark.parametrize("output", [[9], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_an_output_that_differs_or_goes_as_far_finds_nothing(output):
    assert kept_tokens().find(S, IDENTITY, output, now=100.0) == Continuation()


@pytest.mark.parametrize(
    "other",
    [
        output_identity("another", (5, 6, 7), SAMPLING, 0),
        output_identity("tenant", (5, 6, 8), SAMPLING, 0),
        output_identity("tenant", (5, 6), SAMPLING, 0),
        output_identity("tenant", (5, 6, 7), SamplingParams(seed=8), 0),
        output_identity("tenant", (5, 6, 7), SAMPLING, 1),
    ],
)
def test_another_tenants_prompts_or_parameters_output_is_never_found(other):
    assert kept_tokens().find(S, other, [1], now=100.0) == Continuation()


def test_a_rule_that_is_named_is_the_same_as_the_one_that_was_left_to_the_server():
    named = output_identity("tenant", (5, 6, 7), SamplingParams(seed=7, acceptance_rule=AcceptanceRule.COUPLED), 0)
    assert kept_tokens().find(S, named, [1, 2, 3], now=100.0).token_ids == [4]


def test_nothing_is_found_or_held_once_its_time_is_up():
    kept = kept_tokens()
    kept.keep(SessionId("later"), IDENTITY, Epoch(1), [1], now=110.0)
    assert kept.find(S, IDENTITY, [1], now=130.0) == Continuation()
    kept.expire(now=130.0)
    assert len(kept) == 1
    kept.expire(now=140.0)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_a_later_epochs_output_takes_the_place_of_an_earlier_ones():
    kept = kept_tokens()
    kept.keep(S, IDENTITY, Epoch(4), [1, 9], now=101.0)
    assert len(kept) == 1
    assert kept.find(S, IDENTITY, [1], now=101.0) == Continuation([9], Epoch(4))


def test_beyond_so_many_outputs_the_oldest_go_first():
    kept = kept_tokens(max_outputs=2)
    for name in ("a", "b"):
        kept.keep(SessionId(name), IDENTITY, Epoch(1), [1, 2], now=101.0)
    assert kept.find(S, IDENTITY, [], now=101.0) == Continuation()
    assert kept.find(SessionId("a"), IDENTITY, [1], now=101.0).token_ids == [2]


def test_beyond_so_many_bytes_the_oldest_go_first_and_what_never_fits_is_not_kept():
    kept = kept_tokens(max_bytes=2 * BYTES_PER_OUTPUT)
    kept.keep(SessionId("a"), IDENTITY, Epoch(1), [1] * 200, now=101.0)
    assert len(kept) == 1
    kept.keep(SessionId("long"), IDENTITY, Epoch(1), [1] * 10_000, now=101.0)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_without_a_grace_nothing_is_kept():
    kept = KeptTokens(0.0)
    kept.keep(S, IDENTITY, Epoch(1), [1], now=0.0)
    assert len(kept) == 0


@pytest.mark.parametrize(
    ("recorded", "kept", "expected"),
    [
        (Continuation([1], Epoch(2)), Continuation([1, 2, 3], Epoch(1)), [1]),
        (Continuation([1], Epoch(1)), Continuation([1, 2, 3], Epoch(2)), [1, 2, 3]),
        (Continuation([1, 2], Epoch(2)), Continuation([1], Epoch(2)), [1, 2]),
        (Continuation([1], Epoch(2)), Continuation([1, 2], Epoch(2)), [1, 2]),
        (Continuation(), Continuation([1], Epoch(1)), [1]),
        (Continuation([1], Epoch(1)), Continuation(), [1]),
        (Continuation(), Continuation(), []),
    ],
)
def test_the_higher_epoch_wins_and_then_the_longer_output(recorded, kept, expected):
    assert list(chosen(recorded, kept).token_ids) == expected
